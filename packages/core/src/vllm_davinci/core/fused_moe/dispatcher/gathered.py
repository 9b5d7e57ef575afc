"""Every rank gets the tokens of all ranks."""

from dataclasses import dataclass
from typing import ClassVar

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
