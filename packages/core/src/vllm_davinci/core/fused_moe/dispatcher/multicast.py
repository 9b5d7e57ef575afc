"""Each rank broadcasts its tokens in turn; sums are all-reduced, and each rank keeps its own."""

from typing import Any

import torch

from vllm_davinci.core.fused_moe.dispatcher.gathered import GatheredTokens


class MulticastDispatcher(GatheredTokens):
    """Two broadcasts per rank and an all-reduce."""

    def prepare(
        self, x: torch.Tensor, router_logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See TokenDispatcher.prepare."""
        return self._multicast(x), self._multicast(router_logits)

    def finalize(self, sums: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """See TokenDispatcher.finalize."""
        return self.group.all_reduce(sums).split(self.sizes)[self.group.rank_in_group]

    def _multicast(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks, concatenated."""
        everyone = rows.new_empty((sum(self.sizes), *rows.shape[1:]))
        parts = everyone.split(self.sizes)
        parts[self.group.rank_in_group].copy_(rows)
        communicator: Any = self.group.device_communicator
        for source, part in enumerate(parts):
            communicator.broadcast(part, source)
        return everyone
