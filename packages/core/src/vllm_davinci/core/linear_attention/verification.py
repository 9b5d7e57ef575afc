"""Decodes of several tokens, the last of which are drafts that may be rejected.

A request has a page for the states after each token of a step; the next step begins with the states
after the last accepted token. Requests are computed token by token, all at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d


@dataclass(frozen=True)
class Verification:
    """Plan of a step's decodes with up to `width` tokens per request.

    accepted: [num_decodes], int32, on the device: each request's accepted tokens of the previous
              step; its states are in the page of that number
    columns:  [num_decodes, width], int64, on the device: page of the states after each token
    tokens:   [num_decodes * width], int64, on the device: rows of the step's decodes; in padding
              the number of rows. None: the identity
    places:   [rows of the step's decodes], int64, on the device: index of each row's output. None:
              the identity
    """

    width: int
    accepted: torch.Tensor
    columns: torch.Tensor
    tokens: torch.Tensor | None = None
    places: torch.Tensor | None = None

    @property
    def read(self) -> tuple[torch.Tensor, ...]:
        """The tensors that the device reads in a graph."""
        return self.accepted, self.columns


class Verifications:
    """Plans the decodes of one cache group. Tensors that graphs read keep their addresses.

    num_pages: of a request, one more than its maximum number of drafts
    """

    def __init__(self, num_requests: int, num_pages: int, device: torch.device) -> None:
        self._num_pages = num_pages
        self._accepted = torch.ones(num_requests, dtype=torch.int32, device=device)
        in_order = np.arange(num_pages)
        self._columns_on_host = np.tile(in_order, (num_requests, 1))
        self._columns = torch.tensor(self._columns_on_host, dtype=torch.int64, device=device)

    def take_accepted(self, accepted: torch.Tensor) -> None:
        """Stores the previous step's accepted counts. accepted: [num_requests], on the device"""
        self._accepted[: accepted.shape[0]].copy_(accepted)

    def plan(self, lengths: Sequence[int], num_drafts: Sequence[int]) -> Verification:
        """Plans a step's decodes. Copies to the device without waiting.

        lengths:    tokens of each request; 0 in a graph's padding requests
        num_drafts: how many of them are drafts; negative if all tokens are known (a prompt, a
                    preempted request), so that only the last token's states are needed
        """
        length, count = np.asarray(lengths), len(lengths)
        # A request without drafts counts as one accepted token, so its last states go there.
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
