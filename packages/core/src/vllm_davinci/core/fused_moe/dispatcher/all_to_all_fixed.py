"""All-to-all in equal parts, which can be captured in a graph."""

from dataclasses import dataclass
from typing import Any

import torch
import torch_npu
from vllm.distributed.parallel_state import GroupCoordinator

from vllm_davinci.core.fused_moe.dispatcher.base import (
    DispatchedTokens,
    RankExperts,
    SelectedTokens,
)
from vllm_davinci.core.fused_moe.dispatcher.sort import COUNTS, sort_for_all_ranks, sum_by_token
from vllm_davinci.core.fused_moe.dispatcher.tp_slice import SliceDispatcher


@dataclass(frozen=True, kw_only=True)
class ArrivedParts(DispatchedTokens):
    """Rows that came from all ranks of the group; rows without a token are last.

    row_of_arrival:    [num_rows]: index of each sorted row in the order of arrival
    row_of_assignment: [num_tokens * top_k], int32, among the parts sent from here
    topk_weights:      [num_tokens, top_k], of this rank's tokens
    """

    row_of_arrival: torch.Tensor
    row_of_assignment: torch.Tensor
    topk_weights: torch.Tensor


@dataclass(frozen=True)
class FixedAllToAllDispatcher(SliceDispatcher[ArrivedParts]):
    """Three all-to-alls of equal parts: counts, rows, results. The host never waits.

    group: the ranks among which experts are divided, all with the same number of tokens in this
           step
    sends_integers: see AllToAllDispatcher
    A part has room for all rows that its sender's tokens could have on its receiver. Sums are
    complete, or partial if ranks share experts. Bit-identical with AllToAllDispatcher.
    """

    group: GroupCoordinator
    sends_integers: bool = True

    def dispatch(self, tokens: SelectedTokens, experts: RankExperts) -> ArrivedParts:
        """See TokenDispatcher.dispatch."""
        communicator: Any = self.group.device_communicator
        num_ranks, num_local = self.group.world_size, experts.num_local
        num_tokens, top_k = tokens.topk_ids.shape
        room = num_tokens * min(top_k, num_local)  # rows of a part
        rows, row_of_assignment, counts, scales = sort_for_all_ranks(
            tokens, experts, self.sends_integers
        )
        counts_sent = counts.view(num_ranks, num_local)
        rows_sent = counts_sent.sum(1)
        starts = rows_sent.cumsum(0) - rows_sent  # [num_ranks]: first sorted row of each part
        places = torch.arange(room, device=rows.device)
        # After its own rows, a part repeats others, which the receiver assigns to no expert.
        sources = (starts.unsqueeze(1) + places).clamp_(max=rows.shape[0] - 1).view(-1)
        counts_received = communicator.all_to_all(counts_sent)
        arrived = communicator.all_to_all(rows.index_select(0, sources))
        arrived_scales = None
        if scales is not None:
            arrived_scales = communicator.all_to_all(scales.index_select(0, sources))
        nobodys = room - counts_received.sum(1, keepdim=True)
        arrived, sorted_scales, row_of_arrival, tokens_per_expert = torch_npu.npu_moe_re_routing(
            arrived,
            torch.cat([counts_received, nobodys], 1),  # passed as rows of an additional expert
            per_token_scales=arrived_scales,
            expert_token_num_type=COUNTS,
        )
        ranks = tokens.topk_ids.view(-1).to(torch.int64).div(num_local, rounding_mode="floor")
        part_starts = torch.arange(0, num_ranks * room, room, device=rows.device) - starts
        return ArrivedParts(
            rows=arrived,
            tokens_per_expert=tokens_per_expert[:num_local],
            scales=None if scales is None else sorted_scales,
            row_of_arrival=row_of_arrival,
            row_of_assignment=row_of_assignment + part_starts[ranks].to(torch.int32),
            topk_weights=tokens.topk_weights,
        )

    def combine(self, results: torch.Tensor, dispatched: ArrivedParts) -> torch.Tensor:
        """See TokenDispatcher.combine."""
        order = dispatched.row_of_arrival.to(torch.int64)
        results = torch.empty_like(results).index_copy_(0, order, results)
        communicator: Any = self.group.device_communicator
        returned = communicator.all_to_all(results)
        return sum_by_token(returned, dispatched.row_of_assignment, dispatched.topk_weights)
