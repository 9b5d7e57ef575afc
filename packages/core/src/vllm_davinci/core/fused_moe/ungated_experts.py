"""Experts with one projection up and one down (Nemotron-H)."""

from dataclasses import dataclass

import torch

from vllm_davinci.core.fused_moe.local_experts import Experts, grouped_matmul


@dataclass(frozen=True, kw_only=True)
class UngatedExperts(Experts):
    """Unquantized experts of relu(x up)^2 down.

    up:   [num_local, hidden_size, intermediate_size]
    down: [num_local, intermediate_size, hidden_size]
    """

    up: torch.Tensor
    down: torch.Tensor

    def _compute(
        self, rows: torch.Tensor, tokens_per_expert: torch.Tensor, scales: torch.Tensor | None
    ) -> torch.Tensor:
        """See Experts.__call__. Four launches."""
        activated = grouped_matmul(rows, self.up, tokens_per_expert).relu_().square()
        return grouped_matmul(activated, self.down, tokens_per_expert)
