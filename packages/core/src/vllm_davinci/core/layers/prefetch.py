"""Prefetches weights into the cache before the products that read them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch_npu
from vllm.forward_context import get_forward_context

from vllm_davinci.core.components.protocols import StreamScheduler
from vllm_davinci.core.config.sized_choices import SizedChoices

MAX_BYTES = 16 << 20  # more would evict data that later steps read
SIDE = "prefetch"


def prefetch(weight: torch.Tensor, max_bytes: int = MAX_BYTES) -> None:
    """Starts to read `weight` when the current stream has done its work so far.

    max_bytes: most bytes to read; 0 or less reads all. Results do not depend on it.
    """
    size = weight.untyped_storage().nbytes()
    torch_npu.npu_prefetch(weight, None, min(max_bytes, size) if max_bytes > 0 else size)


class Ahead(NamedTuple):
    """A weight that a layer will read; at most its first `num_bytes` are prefetched."""

    weight: torch.Tensor
    num_bytes: int


class PrefetchLimit:
    """Most bytes that a step prefetches of one weight, by its tokens; shared by all layers."""

    def __init__(self, max_bytes: int, by_size: SizedChoices | None = None) -> None:
        self._max_bytes, self._by_size = max_bytes, by_size

    def of_step(self, num_tokens: int) -> int:
        """The limit for a step of `num_tokens` tokens; 0 prefetches nothing."""
        chosen = None if self._by_size is None else self._by_size.at(num_tokens)
        return self._max_bytes if chosen is None else chosen

    def fix(self, max_bytes: int) -> None:
        """Sets one limit for all steps."""
        self._max_bytes, self._by_size = max_bytes, None

    def choose(self, by_size: SizedChoices | None) -> None:
        """Sets the limits of steps from these choices."""
        self._by_size = by_size


class WeightPrefetch:
    """Prefetches the next layer's weights during an all-reduce, which leaves memory idle.

    Call `begin` before a layer's all-reduce. The weights are read on a side stream, so that no
    other stream waits for them; a product that starts before the end reads the rest itself.

    weights:   in the order of their use
    attention: name of an attention layer, whose metadata tells decodes from prefills
    limit:     in bytes, of each weight
    is_last:   True for the last layer that runs: the step's stream then waits for all prefetches,
               as a captured graph requires
    """

    def __init__(
        self,
        scheduler: StreamScheduler,
        weights: Sequence[Ahead],
        attention: str,
        limit: PrefetchLimit,
        is_last: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._weights = weights
        self._attention = attention
        self._limit = limit
        self.is_last = is_last

    def is_on(self, num_tokens: int) -> bool:
        """True if decode-only steps of `num_tokens` tokens prefetch weights."""
        return self._limit.of_step(num_tokens) > 0

    def fetches(self, num_tokens: int) -> bool:
        """True if decode-only steps of `num_tokens` tokens prefetch the next layer's weights."""
        return bool(self._weights) and self.is_on(num_tokens)

    def begin(self) -> None:
        """Prefetches in unsplit decode-only steps; in other steps products hide the reads."""
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict) or not metadata[self._attention].is_decode_everywhere:
            return
        most = self._limit.of_step(metadata[self._attention].num_actual_tokens)
        if most == 0 or self._scheduler.current_ubatch() is not None:
            return
        if self.is_last:
            self._scheduler.finish(SIDE)
        elif self._weights:
            self._scheduler.start(SIDE, lambda: self._fetch(most))

    def _fetch(self, most: int) -> None:
        for weight, num_bytes in self._weights:
            prefetch(weight, min(num_bytes, most))
