"""Tokens that are already on the ranks of their experts."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_davinci.core.fused_moe.dispatcher.base import (
    DispatchedTokens,
    RankExperts,
    SelectedTokens,
    TokenDispatcher,
)
from vllm_davinci.core.fused_moe.dispatcher.sort import slots_of_rows, sort_by_expert, sum_by_token


@dataclass(frozen=True, kw_only=True)
class SortedTokens(DispatchedTokens):
    """row_of_assignment: [num_tokens * top_k], int32; topk_weights: [num_tokens, top_k]"""

    row_of_assignment: torch.Tensor
    topk_weights: torch.Tensor


class LocalDispatcher(TokenDispatcher[SortedTokens]):
    """No communication: computes this rank's experts, with one launch before and one after them.

    Sums are zero for a token without experts here. The host never waits.
    """

    keeps_rows: ClassVar[bool] = True

    def prepare(
        self, x: torch.Tensor, router_logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See TokenDispatcher.prepare."""
        return x, router_logits

    def dispatch(self, tokens: SelectedTokens, experts: RankExperts) -> SortedTokens:
        """See TokenDispatcher.dispatch."""
        rows, row_of_assignment, tokens_per_expert, scales = sort_by_expert(
            tokens.x,
            tokens.topk_ids,
            experts.num_experts,
            experts.first,
            experts.num_local,
            quantized=experts.takes_integers,
        )
        return SortedTokens(
            rows=rows,
            tokens_per_expert=tokens_per_expert,
            scales=scales,
            row_of_assignment=row_of_assignment,
            topk_weights=tokens.topk_weights,
            slots=None if tokens.slots is None else slots_of_rows(tokens.slots, row_of_assignment),
        )

    def combine(self, results: torch.Tensor, dispatched: SortedTokens) -> torch.Tensor:
        """See TokenDispatcher.combine."""
        return sum_by_token(results, dispatched.row_of_assignment, dispatched.topk_weights)

    def finalize(self, sums: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """See TokenDispatcher.finalize."""
        return sums
