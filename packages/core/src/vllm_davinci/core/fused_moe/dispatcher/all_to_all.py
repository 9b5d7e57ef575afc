"""Sends tokens to the ranks of their experts, without padding, and the results back."""

from collections.abc import Sequence
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
from vllm_davinci.core.fused_moe.dispatcher.pieces import ExpertPieces
from vllm_davinci.core.fused_moe.dispatcher.row_counts import CountsWait, RowCounts
from vllm_davinci.core.fused_moe.dispatcher.sort import COUNTS, sort_for_all_ranks, sum_by_token
from vllm_davinci.core.fused_moe.dispatcher.tp_slice import SliceDispatcher


@dataclass(frozen=True, kw_only=True)
class ArrivedTokens(DispatchedTokens):
    """Rows that came from all ranks of the group.

    row_of_arrival:    [num_rows]: index of each sorted row in the order of arrival; None if no rows
                       arrived
    row_of_assignment: [num_tokens * top_k], int32, among the rows sent from here
    topk_weights:      [num_tokens, top_k], of this rank's tokens
    sent, received:    rows to and from each rank
    """

    row_of_arrival: torch.Tensor | None
    row_of_assignment: torch.Tensor
    topk_weights: torch.Tensor
    sent: list[int]
    received: list[int]


@dataclass(frozen=True)
class AllToAllDispatcher(SliceDispatcher[ArrivedTokens]):
    """Three all-to-alls: counts, rows, results. The host waits for the counts, once per layer.

    group: the ranks among which experts are divided
    most_tokens: of any rank's slice; all ranks pass the same
    sends_integers: whether rows for int8 experts are sent as int8, in half the bytes, with their
                    scales in a fourth all-to-all
    Sums are complete, or partial if ranks share experts.
    """

    group: GroupCoordinator
    counts_wait: CountsWait
    most_tokens: int
    sends_integers: bool = True

    def split(self, tokens: SelectedTokens, pieces: ExpertPieces) -> Sequence[SelectedTokens]:
        """See TokenDispatcher.split. A rank with fewer tokens than others repeats its last one."""
        parts = pieces.of(len(tokens.x), self.most_tokens)
        if len(parts) == 1:
            return (tokens,)
        last = slice(len(tokens.x) - 1, None)
        return [tokens.part(part if part.start < len(tokens.x) else last) for part in parts]

    def dispatch(self, tokens: SelectedTokens, experts: RankExperts) -> ArrivedTokens:
        """See TokenDispatcher.dispatch.

        The host waits for row counts, which the collective of the rows needs. In a ubatch the
        counts are sent on the communication stream. So the wait ends while the device still
        computes other ubatches, and these rows are sent before theirs.
        """
        communicator: Any = self.group.device_communicator
        rows, row_of_assignment, counts, scales = sort_for_all_ranks(
            tokens, experts, self.sends_integers
        )
        # Rows sent, by [rank, its expert]; received counts are by [rank, expert of this rank].
        counts_sent = counts.view(self.group.world_size, experts.num_local)

        def count() -> tuple[torch.Tensor, RowCounts]:
            counts_received = communicator.all_to_all(counts_sent)
            return counts_received, RowCounts(counts_sent, counts_received, rows.shape[0])

        def move(
            counted: tuple[torch.Tensor, RowCounts],
        ) -> tuple[torch.Tensor, list[torch.Tensor], list[int], list[int]]:
            counts_received, on_host = counted
            sent, received = on_host.wait(self.counts_wait, self.group)
            parts = [rows] if scales is None else [rows, scales]
            arrived = [communicator.all_to_all(part, received, sent) for part in parts]
            return counts_received, arrived, sent, received

        counts_received, parts, sent, received = communicator.sized_exchange(count, move)
        arrived, arrived_scales = parts[0], None if scales is None else parts[1]
        row_of_arrival, tokens_per_expert = None, counts_received[0]
        if sum(received):
            arrived, sorted_scales, row_of_arrival, tokens_per_expert = (
                torch_npu.npu_moe_re_routing(
                    arrived,
                    counts_received,
                    per_token_scales=arrived_scales,
                    expert_token_num_type=COUNTS,
                )
            )
            arrived_scales = None if scales is None else sorted_scales
        else:  # no rows arrived
            arrived, arrived_scales = tokens.x[:0], None
        return ArrivedTokens(
            rows=arrived,
            tokens_per_expert=tokens_per_expert,
            scales=arrived_scales,
            row_of_arrival=row_of_arrival,
            row_of_assignment=row_of_assignment,
            topk_weights=tokens.topk_weights,
            sent=sent,
            received=received,
        )

    def combine(self, results: torch.Tensor, dispatched: ArrivedTokens) -> torch.Tensor:
        """See TokenDispatcher.combine."""
        if dispatched.row_of_arrival is not None:
            # Back to the order of arrival, which the all-to-all needs.
            order = dispatched.row_of_arrival.to(torch.int64)
            results = torch.empty_like(results).index_copy_(0, order, results)
        communicator: Any = self.group.device_communicator
        returned = communicator.all_to_all(results, dispatched.sent, dispatched.received)
        return sum_by_token(returned, dispatched.row_of_assignment, dispatched.topk_weights)
