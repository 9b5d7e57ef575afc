"""Every rank gets the tokens of all ranks: all at once, or one rank's after another's."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.distributed.parallel_state import GroupCoordinator

from vllm_davinci.core.fused_moe.dispatcher.local import LocalDispatcher


@dataclass(frozen=True)
class GatheredTokens(LocalDispatcher):
    """Base of dispatchers whose `prepare` gives each rank the tokens of all ranks, in order.

    group: ranks that together hold every token once
    sizes: tokens of each rank
    """

    gathers: ClassVar[bool] = True

    group: GroupCoordinator
    sizes: list[int]

    def own_rows(self, num_tokens: int) -> slice:
        """See TokenDispatcher.own_rows."""
        begin = sum(self.sizes[: self.group.rank_in_group])
        return slice(begin, begin + num_tokens)


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
