"""Selects the dispatcher of a layer's step.

Usually all TP ranks of a DP rank enter a layer with the same tokens and leave it with partial sums,
which vLLM's runner all-reduces together with the shared experts'. In a sequence-parallel layer each
TP rank enters with its own tokens and leaves with their whole sums.
"""

from dataclasses import dataclass
from typing import Any

from vllm.config import CUDAGraphMode
from vllm.distributed import get_dp_group, get_ep_group
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.forward_context import get_forward_context

from vllm_davinci.core import components
from vllm_davinci.core.fused_moe.communication import (
    ONE_DP_RANK,
    Choice,
    CommunicationMethod,
    CommunicationRule,
)
from vllm_davinci.core.fused_moe.dispatcher.all_to_all import AllToAllDispatcher
from vllm_davinci.core.fused_moe.dispatcher.all_to_all_fixed import FixedAllToAllDispatcher
from vllm_davinci.core.fused_moe.dispatcher.base import TokenDispatcher
from vllm_davinci.core.fused_moe.dispatcher.fused import FusedDispatcher
from vllm_davinci.core.fused_moe.dispatcher.gathered import AllGatherDispatcher, MulticastDispatcher
from vllm_davinci.core.fused_moe.dispatcher.row_counts import CountsWait
from vllm_davinci.core.fused_moe.dispatcher.tp_slice import TPSlice
from vllm_davinci.core.fused_moe.process_groups import expert_group, fused_group
from vllm_davinci.core.log import init_logger

logger = init_logger(__name__)


@dataclass(frozen=True)
class DispatcherSelector:
    """Selects one layer's dispatcher for each step, if ranks communicate.

    sequence_parallel: whether each TP rank enters with its own tokens
    tp_rank:           this rank's index in its DP rank
    counts_wait:       host wait for row counts, if the method needs one
    num_ubatches:      of split steps
    """

    rule: CommunicationRule
    sequence_parallel: bool
    tp_rank: int
    counts_wait: CountsWait
    num_ubatches: int = 2

    def of_step(self, num_tokens: int) -> TokenDispatcher[Any]:
        """The dispatcher of a step. num_tokens: of this rank; vLLM's context has the others'"""
        sizes = self._sizes(num_tokens)
        choice = self._choose(max(sizes))
        logger.info_once("Mixture of experts: %s, because %s.", choice.method.value, choice.reason)
        if choice.method is CommunicationMethod.ALL_GATHER:
            return AllGatherDispatcher(self._token_group, sizes)
        if choice.method is CommunicationMethod.MULTICAST:
            return MulticastDispatcher(self._token_group, sizes)
        layout, tp_slice = self.rule.layout, self._tp_slice
        if choice.method is CommunicationMethod.FUSED:
            return FusedDispatcher(tp_slice, fused_group(layout), tp_slice.size(max(sizes)))
        if get_forward_context().cudagraph_runtime_mode == CUDAGraphMode.FULL:
            # In a capture all ranks have equally many tokens, and the host must not wait for
            # counts.
            return FixedAllToAllDispatcher(tp_slice, expert_group(layout), self.rule.sends_integers)
        return AllToAllDispatcher(
            tp_slice,
            expert_group(layout),
            self.counts_wait,
            tp_slice.size(max(sizes)),
            self.rule.sends_integers,
        )

    def _choose(self, max_tokens: int) -> Choice:
        """The step's dispatch method. max_tokens: most of any rank of the token group"""
        per_dp_rank = self.rule.tp_size if self.sequence_parallel else 1
        scheduler = components.stream_scheduler() if self.rule.overlapped else None
        is_part = scheduler is not None and scheduler.current_ubatch() is not None
        return self.rule.choose(max_tokens * per_dp_rank, self.num_ubatches if is_part else 1)

    @property
    def _token_group(self) -> GroupCoordinator:
        """Ranks that together hold every token once."""
        return get_ep_group() if self.sequence_parallel else get_dp_group()

    @property
    def _tp_slice(self) -> TPSlice:
        if self.sequence_parallel:
            return TPSlice(0, 1)
        etp_size = self.rule.layout.etp_size
        return TPSlice(self.tp_rank // etp_size, self.rule.tp_size // etp_size)

    def _sizes(self, num_tokens: int) -> list[int]:
        """Tokens of each rank of the token group."""
        metadata = get_forward_context().dp_metadata
        if metadata is None:  # one DP rank
            return [num_tokens] * self._token_group.world_size
        sizes = metadata.get_chunk_sizes_across_dp_rank()
        assert sizes is not None
        return sizes


def dispatcher_selector(
    rule: CommunicationRule,
    sequence_parallel: bool,
    tp_rank: int,
    counts_wait: CountsWait,
    num_ubatches: int = 2,
) -> DispatcherSelector | None:
    """The selector; None if tokens never leave their DP rank."""
    gathering = (CommunicationMethod.ALL_GATHER, CommunicationMethod.MULTICAST)
    if rule.dp_size == 1 and (rule.forced is None or rule.forced in gathering):
        if rule.forced is not None:
            logger.warning_once(
                "additional_config key 'moe_communication' = %r has no effect: %s. Remove the key.",
                rule.forced.value,
                ONE_DP_RANK,
            )
        elif rule.layout.world_size > 1:
            logger.info_once("Mixture of experts: no exchange of tokens, because %s.", ONE_DP_RANK)
        return None
    return DispatcherSelector(rule, sequence_parallel, tp_rank, counts_wait, num_ubatches)
