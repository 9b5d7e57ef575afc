"""Weights on their way into the cache before the products that read them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch_npu
from vllm.forward_context import get_forward_context

from vllm_davinci.core.components.protocols import StreamScheduler
from vllm_davinci.core.config.sized_choices import SizedChoices

MAX_BYTES = 16 << 20  # more would push out what the steps before it need
SIDE = "prefetch"


def prefetch(weight: torch.Tensor, max_bytes: int = MAX_BYTES) -> None:
    """Begins to read `weight` when the current stream has done its work so far.

    max_bytes: at most so many; 0 or less reads all. No result depends on it.
    """
    size = weight.untyped_storage().nbytes()
    torch_npu.npu_prefetch(weight, None, min(max_bytes, size) if max_bytes > 0 else size)


class Ahead(NamedTuple):
    """A weight that a layer will read, of which the first `num_bytes` are fetched at most."""

    weight: torch.Tensor
    num_bytes: int


class PrefetchLimit:
    """The most bytes that a step fetches of one weight, by its tokens; shared by all layers."""

    def __init__(self, max_bytes: int, by_size: SizedChoices | None = None) -> None:
        self._max_bytes, self._by_size = max_bytes, by_size

    def of_step(self, num_tokens: int) -> int:
        """0 where such a step fetches nothing."""
        chosen = None if self._by_size is None else self._by_size.at(num_tokens)
        return self._max_bytes if chosen is None else chosen

    def fix(self, max_bytes: int) -> None:
        """All steps fetch so much from now on."""
        self._max_bytes, self._by_size = max_bytes, None

    def choose(self, by_size: SizedChoices | None) -> None:
        """Steps fetch by these choices from now on."""
        self._by_size = by_size


class WeightPrefetch:
    """The weights of the layer after a reduction, fetched while the reduction has the links.

    `begin` stands before a layer's sum over ranks, during which nothing else reads memory. The
    weights come on a stream of their own, so that nobody waits for them; a product that begins
    before its weight is there reads the rest itself.

    weights:   in the order of their use
    attention: name of an attention layer, whose metadata says what kind of step it is
    limit:     of the bytes of each weight
    is_last:   of the layers that run: the step's stream then waits for all that was fetched, as a
               captured graph needs it
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
        """Whether a step of so many tokens fetches anything, where it is one that may."""
        return self._limit.of_step(num_tokens) > 0

    def fetches(self, num_tokens: int) -> bool:
        """Whether such a step fetches what the next layer reads."""
        return bool(self._weights) and self.is_on(num_tokens)

    def begin(self) -> None:
        """In a step of decodes that is not split; elsewhere products hide what they read."""
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
