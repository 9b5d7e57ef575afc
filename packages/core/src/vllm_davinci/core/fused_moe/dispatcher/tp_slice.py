"""Dispatchers that send each token once, although all TP ranks of a DP rank hold it.

Each TP rank sends a slice of the tokens. Its layer output is zero for the other slices, and vLLM's
runner all-reduces the outputs within the DP rank together with the shared experts'.
"""

from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch

from vllm_davinci.core.fused_moe.dispatcher.base import DispatchedTokens, TokenDispatcher

D = TypeVar("D", bound=DispatchedTokens)


@dataclass(frozen=True)
class TPSlice:
    """The slice of its DP rank's tokens that a rank sends: slice `index` of `count` equal ones."""

    index: int
    count: int

    def size(self, num_tokens: int) -> int:
        """Tokens per slice; the last slices are padded."""
        return -(-num_tokens // self.count)


@dataclass(frozen=True)
class SliceDispatcher(TokenDispatcher[D]):
    """Sends this rank's slice only."""

    slices_tokens: ClassVar[bool] = True
    balances_dummy_steps: ClassVar[bool] = True

    tp_slice: TPSlice

    def prepare(
        self, x: torch.Tensor, router_logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See TokenDispatcher.prepare."""
        count = self.tp_slice.count
        if count == 1:
            return x, router_logits
        size = self.tp_slice.size(x.shape[0])
        if missing := size * count - x.shape[0]:
            x = torch.nn.functional.pad(x, (0, 0, 0, missing))
            router_logits = torch.nn.functional.pad(router_logits, (0, 0, 0, missing))
        own = self._rows(size)
        return x[own], router_logits[own]

    def own_rows(self, num_tokens: int) -> slice:
        """See TokenDispatcher.own_rows."""
        return slice(0, self.tp_slice.size(num_tokens))

    def first_token(self, num_tokens: int) -> int:
        """See TokenDispatcher.first_token."""
        return self.tp_slice.index * self.tp_slice.size(num_tokens)

    def finalize(self, sums: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """See TokenDispatcher.finalize."""
        count = self.tp_slice.count
        if count == 1:
            return sums
        size = self.tp_slice.size(num_tokens)
        output = sums.new_zeros(size * count, sums.shape[1])
        output[self._rows(size)] = sums
        return output[:num_tokens]

    def _rows(self, size: int) -> slice:
        begin = self.tp_slice.index * size
        return slice(begin, begin + size)
