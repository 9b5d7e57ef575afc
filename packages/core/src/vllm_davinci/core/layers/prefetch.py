"""Weights on their way into the cache before the products that read them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch_npu
from vllm.forward_context import get_forward_context

from vllm_davinci.core.components.protocols import StreamScheduler

MAX_BYTES = 16 << 20  # more would push out what the steps before it need
SIDE = "prefetch"


def prefetch(weight: torch.Tensor, max_bytes: int = MAX_BYTES) -> None:
    """Begins to read `weight` when the current stream has done its work so far.

    max_bytes: at most so many; 0 or less reads all. No result depends on it.
    """
    size = weight.untyped_storage().nbytes()
    torch_npu.npu_prefetch(weight, None, min(max_bytes, size) if max_bytes > 0 else size)


class Ahead(NamedTuple):
    """A weight that a layer will read, of which the first `num_bytes` are fetched."""

    weight: torch.Tensor
    num_bytes: int


class WeightPrefetch:
    """The weights of the layer after a reduction, fetched while the reduction has the links.

    `begin` stands before a layer's sum over ranks, during which nothing else reads memory. The
    weights come on a stream of their own, so that nobody waits for them; a product that begins
    before its weight is there reads the rest itself.

    weights:   in the order of their use
    attention: name of an attention layer, whose metadata says what kind of step it is
    is_last:   of a stage's layers: the step's stream then waits for all that was fetched, as a
               captured graph needs it
    """

    def __init__(
        self,
        scheduler: StreamScheduler,
        weights: Sequence[Ahead],
        attention: str,
        is_last: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._weights = weights
        self._attention = attention
        self._is_last = is_last

    def begin(self) -> None:
        """In a step of decodes that is not split; elsewhere products hide what they read."""
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict) or not metadata[self._attention].is_decode_everywhere:
            return
        if self._scheduler.current_ubatch() is not None:
            return
        if self._weights:
            self._scheduler.start(SIDE, self._fetch)
        if self._is_last:
            self._scheduler.finish(SIDE)

    def _fetch(self) -> None:
        for weight, num_bytes in self._weights:
            prefetch(weight, num_bytes)
