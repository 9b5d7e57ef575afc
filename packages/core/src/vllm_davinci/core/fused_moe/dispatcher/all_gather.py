"""Gathers all tokens on every rank, which computes its own experts; sums are reduce-scattered."""

import torch

from vllm_davinci.core.fused_moe.dispatcher.gathered import GatheredTokens


class AllGatherDispatcher(GatheredTokens):
    """Two all-gathers and a reduce-scatter."""

    def prepare(
        self, x: torch.Tensor, router_logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See TokenDispatcher.prepare."""
        all_x, all_logits = self.group.all_gatherv([x, router_logits], 0, self.sizes)
        return all_x, all_logits

    def finalize(self, sums: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """See TokenDispatcher.finalize."""
        return self.group.reduce_scatterv(sums, 0, self.sizes)
