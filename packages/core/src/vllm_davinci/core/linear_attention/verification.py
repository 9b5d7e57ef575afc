"""Decodes of several tokens, of which the last ones are drafts that may be rejected.

A request has a page for the states after each token of a step: the one after its last kept token is
where the next step begins. Requests are computed token by token, all of them at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d


@dataclass(frozen=True)
class Verification:
    """How the decodes of a step are computed whose requests have up to `width` tokens.

    accepted: [num_decodes], int32, on the device: tokens of the step before that were kept, of each
              request; its states are in the page of that number
    columns:  [num_decodes, width], int64, of the device: page of the states after each token
    tokens:   [num_decodes * width], int64, of the device: rows of the step's decodes, or their
              number in padding. None: they are these rows
    places:   [rows of the step's decodes], int64, of the device: where the outputs of each stand.
              None: likewise
    """

    width: int
    accepted: torch.Tensor
    columns: torch.Tensor
    tokens: torch.Tensor | None = None
    places: torch.Tensor | None = None

    @property
    def read(self) -> tuple[torch.Tensor, ...]:
        """The tensors of it that the device reads in a graph."""
        return self.accepted, self.columns


class Verifications:
    """Plans the decodes of one cache group. What graphs read is in memory that stays.

    num_pages: of a request, one more than it has drafts at most
    """

    def __init__(self, num_requests: int, num_pages: int, device: torch.device) -> None:
        self._num_pages = num_pages
        self._accepted = torch.ones(num_requests, dtype=torch.int32, device=device)
        in_order = np.arange(num_pages)
        self._columns_on_host = np.tile(in_order, (num_requests, 1))
        self._columns = torch.tensor(self._columns_on_host, dtype=torch.int64, device=device)

    def take_accepted(self, accepted: torch.Tensor) -> None:
        """Takes what was kept of the step before. accepted: [num_requests], on the device"""
        self._accepted[: accepted.shape[0]].copy_(accepted)

    def plan(self, lengths: Sequence[int], num_drafts: Sequence[int]) -> Verification:
        """Plans a step's decodes. Copies to the device, which nothing waits for.

        lengths:    tokens of each request; 0 in requests that are a graph's padding
        num_drafts: how many of them are drafts; negative for tokens that are known, of a prompt or
                    of a request that was preempted, of which only the last one's states are needed
        """
        length, count = np.asarray(lengths), len(lengths)
        # A request without drafts counts as one that kept one token: its last states belong there.
        back = np.where(np.asarray(num_drafts) < 0, np.maximum(length - 1, 0), 0)
        columns = (np.arange(self._num_pages) - back[:, None]) % self._num_pages
        if not np.array_equal(columns, self._columns_on_host[:count]):
            self._columns_on_host[:count] = columns
            self._columns[:count].copy_(async_tensor_h2d(columns, self._columns.device))
        width = max(int(length.max()), 1)
        of_step = self._accepted[:count], self._columns[:count, :width]
        if width == self._num_pages and np.isin(length, (0, width)).all():
            return Verification(width, *of_step)
        step = np.arange(width)
        is_token = step < length[:, None]
        starts = np.cumsum(length) - length
        tokens = np.where(is_token, starts[:, None] + step, length.sum()).reshape(-1)
        places = np.flatnonzero(is_token)
        copied = async_tensor_h2d(np.concatenate([tokens, places]), self._columns.device)
        return Verification(width, *of_step, *copied.split([tokens.size, places.size]))
