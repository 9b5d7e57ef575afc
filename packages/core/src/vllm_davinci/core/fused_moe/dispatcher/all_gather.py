"""All tokens everywhere; each rank computes its experts; sums go back to the tokens' ranks."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from vllm.distributed.parallel_state import GroupCoordinator

from vllm_davinci.core.fused_moe.dispatcher.local import LocalDispatcher


@dataclass(frozen=True)
class AllGatherDispatcher(LocalDispatcher):
    """Two all-gathers and a reduce-scatter.

    group: ranks that between them hold every token once
    sizes: tokens of each of them
    """

    gathers: ClassVar[bool] = True

    group: GroupCoordinator
    sizes: list[int]

    def prepare(
        self, x: torch.Tensor, router_logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See TokenDispatcher.prepare."""
        all_x, all_logits = self.group.all_gatherv([x, router_logits], 0, self.sizes)
        return all_x, all_logits

    def own_rows(self, num_tokens: int) -> slice:
        """See TokenDispatcher.own_rows."""
        begin = sum(self.sizes[: self.group.rank_in_group])
        return slice(begin, begin + num_tokens)

    def finalize(self, sums: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """See TokenDispatcher.finalize."""
        return self.group.reduce_scatterv(sums, 0, self.sizes)
