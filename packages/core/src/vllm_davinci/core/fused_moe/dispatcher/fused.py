"""Fused dispatch and combine: one launch to the experts' ranks, one back."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch_npu
from vllm.distributed.parallel_state import GroupCoordinator

from vllm_davinci.core.device.soc import FusedExperts
from vllm_davinci.core.fused_moe.dispatcher.base import (
    DispatchedTokens,
    RankExperts,
    SelectedTokens,
)
from vllm_davinci.core.fused_moe.dispatcher.pieces import ExpertPieces
from vllm_davinci.core.fused_moe.dispatcher.tp_slice import SliceDispatcher

# quant_mode of the dispatch.
NOT_QUANTIZED, DYNAMIC = 0, 2
COUNTS = 1  # expert_token_nums_type


@dataclass(frozen=True)
class FusedGroup:
    """Ranks among which experts are divided, in a dedicated group.

    name:       of the group's communicator, for the launches
    max_tokens: most tokens per rank in any launch. All launches of a model pass this number, even
                with fewer tokens: it decides where a launch writes each rank's tokens. Otherwise a
                launch could overwrite an earlier one's tokens that a slower rank still reads.
    """

    coordinator: GroupCoordinator
    name: str
    limits: FusedExperts
    max_tokens: int


@dataclass(frozen=True, kw_only=True)
class FusedTokens(DispatchedTokens):
    """Rows from npu_moe_distribute_dispatch_v2, and the inputs of the combine.

    num_tokens:   of this rank; a launch without tokens counts as one
    topk_ids:     [tokens, top_k], int32; topk_weights: [tokens, top_k], fp32
    assist, ends, row_weights: results of the dispatch that the combine needs
    common:       arguments of both launches
    """

    num_tokens: int
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    assist: torch.Tensor
    ends: torch.Tensor
    row_weights: torch.Tensor
    common: dict[str, Any]


@dataclass(frozen=True)
class FusedDispatcher(SliceDispatcher[FusedTokens]):
    """One launch sends tokens to the experts' ranks, one sends results back. Counts stay on the
    device: the host never waits.

    most_tokens: of any rank's slice; all ranks pass the same
    Tokens are bf16 or fp16. Sums are complete, or partial if ranks share experts.
    """

    group: FusedGroup
    most_tokens: int

    def split(self, tokens: SelectedTokens, pieces: ExpertPieces) -> Sequence[SelectedTokens]:
        """See TokenDispatcher.split. A part has one launch's tokens at most, fewer than a chunk."""
        size = self._tokens_per_launch
        if size == self.most_tokens:
            return (tokens,)
        return [
            tokens.part(slice(begin, begin + size)) for begin in range(0, self.most_tokens, size)
        ]

    @property
    def _tokens_per_launch(self) -> int:
        num_launches = -(-self.most_tokens // self.group.max_tokens)
        return -(-self.most_tokens // num_launches)

    def dispatch(self, tokens: SelectedTokens, experts: RankExperts) -> FusedTokens:
        """See TokenDispatcher.dispatch."""
        x, topk_weights, topk_ids = tokens.x, tokens.topk_weights.float(), tokens.topk_ids
        num_tokens = x.shape[0]
        if num_tokens == 0:  # a launch needs at least one token; its sum is unused
            x = x.new_zeros(1, x.shape[1])
            topk_weights = topk_weights.new_zeros(1, topk_weights.shape[1])
            topk_ids = torch.arange(topk_ids.shape[1], dtype=torch.int32, device=x.device)
            topk_ids = topk_ids.unsqueeze(0)
        limits, common = self.group.limits, self._of_both_launches(experts.num_experts)
        communicator: Any = self.group.coordinator.device_communicator
        rows, scales, assist, tokens_per_expert, ends, _, row_weights = communicator.launch_own(
            partial(
                torch_npu.npu_moe_distribute_dispatch_v2,
                x,
                topk_ids,
                expert_scales=topk_weights if limits.weights_at_dispatch else None,
                quant_mode=DYNAMIC if experts.takes_integers else NOT_QUANTIZED,
                expert_token_nums_type=COUNTS,
                **common,
            )
        )
        return FusedTokens(
            rows=rows,
            tokens_per_expert=tokens_per_expert,
            scales=scales if experts.takes_integers else None,
            num_tokens=num_tokens,
            topk_ids=topk_ids,
            topk_weights=topk_weights,
            assist=assist,
            ends=ends,
            row_weights=row_weights,
            common=common,
        )

    def combine(self, results: torch.Tensor, dispatched: FusedTokens) -> torch.Tensor:
        """See TokenDispatcher.combine."""
        weights_at_dispatch = self.group.limits.weights_at_dispatch
        communicator: Any = self.group.coordinator.device_communicator
        (sums,) = communicator.launch_own(
            lambda: (
                torch_npu.npu_moe_distribute_combine_v2(
                    results,
                    dispatched.topk_ids,
                    dispatched.assist,
                    dispatched.ends,
                    dispatched.topk_weights,
                    expand_scales=dispatched.row_weights if weights_at_dispatch else None,
                    **dispatched.common,
                ),
            )
        )
        return sums[: dispatched.num_tokens]

    def _of_both_launches(self, num_experts: int) -> dict[str, Any]:
        """Arguments of both launches. Shared experts are the model's own, on every rank."""
        world_size = self.group.coordinator.world_size
        return {
            "group_ep": self.group.name,
            "ep_world_size": world_size,
            "ep_rank_id": self.group.coordinator.rank_in_group,
            "moe_expert_num": num_experts,
            "shared_expert_num": 0,
            "shared_expert_rank_num": 0,
            "global_bs": self.group.max_tokens * world_size,
            "comm_alg": self.group.limits.communication,
        }
