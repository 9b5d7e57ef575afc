"""Each rank broadcasts its tokens in turn; sums are reduced everywhere; own ones are kept."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.distributed.parallel_state import GroupCoordinator

from vllm_davinci.core.fused_moe.dispatcher.local import LocalDispatcher


@dataclass(frozen=True)
class MulticastDispatcher(LocalDispatcher):
    """Two broadcasts per rank and an all-reduce.

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
        return self._multicast(x), self._multicast(router_logits)

    def own_rows(self, num_tokens: int) -> slice:
        """See TokenDispatcher.own_rows."""
        begin = sum(self.sizes[: self.group.rank_in_group])
        return slice(begin, begin + num_tokens)

    def finalize(self, sums: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """See TokenDispatcher.finalize."""
        return self.group.all_reduce(sums).split(self.sizes)[self.group.rank_in_group]

    def _multicast(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks, at their cumulative counts."""
        everyone = rows.new_empty((sum(self.sizes), *rows.shape[1:]))
        parts = everyone.split(self.sizes)
        parts[self.group.rank_in_group].copy_(rows)
        communicator: Any = self.group.device_communicator
        for source, part in enumerate(parts):
            communicator.broadcast(part, source)
        return everyone
