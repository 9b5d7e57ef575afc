"""Tokens to the ranks of their experts in one launch, and their sums back in one."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch_npu
from vllm.distributed.parallel_state import GroupCoordinator

from vllm_davinci.core.device.soc import FusedExperts
from vllm_davinci.core.fused_moe.beside import ALONE, Beside

if TYPE_CHECKING:
    from vllm_davinci.core.fused_moe.forward import RoutedForward

# quant_mode of the dispatch.
NOT_QUANTIZED, DYNAMIC = 0, 2
COUNTS = 1  # expert_token_nums_type


@dataclass(frozen=True)
class FusedGroup:
    """Ranks among which experts are dealt out, in a group that nothing else uses.

    name: of the group's communicator, by which the launches find it
    """

    coordinator: GroupCoordinator
    name: str
    limits: FusedExperts


def dispatch_and_combine(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    forward: "RoutedForward",
    group: FusedGroup,
    most_tokens: int,
    beside: Beside = ALONE,
) -> torch.Tensor:
    """The routed sum of tokens that no other rank of the group has.

    x: [num_tokens, hidden_size], bf16 or fp16; router_logits: [num_tokens, num_experts]
    most_tokens: of any rank of the group; all pass the same
    Returns [num_tokens, hidden_size]: whole sums, or parts where ranks share experts.

    Every rank makes as many launches, each of at most group.limits.max_tokens tokens. Counts stay
    on the device: the host waits for nothing.
    """
    topk_weights, topk_ids = forward.choose(x, router_logits)
    beside.chosen()
    if forward.weight_on_input:
        x, topk_weights = x * topk_weights, torch.ones_like(topk_weights)
    topk_weights = topk_weights.float()
    num_parts = -(-most_tokens // group.limits.max_tokens)
    size = -(-most_tokens // num_parts)
    sums = [
        _one_part(
            x[begin : begin + size],
            topk_weights[begin : begin + size],
            topk_ids[begin : begin + size],
            forward,
            group,
            min(size, most_tokens - begin),
            beside.dispatched if begin == 0 else _nothing,
            beside.computed if begin + size >= most_tokens else _nothing,
        )
        for begin in range(0, most_tokens, size)
    ]
    return sums[0] if len(sums) == 1 else torch.cat(sums)


def _nothing() -> None:
    """A part in the middle is no moment for others."""


def _one_part(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    forward: "RoutedForward",
    group: FusedGroup,
    most_tokens: int,
    dispatched: Callable[[], None],
    computed: Callable[[], None],
) -> torch.Tensor:
    """See dispatch_and_combine; of tokens that fit into one launch."""
    experts = forward.experts
    num_tokens = x.shape[0]
    if num_tokens == 0:  # a launch takes at least one, and whose sum it is does not matter
        x = x.new_zeros(1, x.shape[1])
        topk_weights = topk_weights.new_zeros(1, topk_weights.shape[1])
        topk_ids = torch.arange(topk_ids.shape[1], dtype=torch.int32, device=x.device).unsqueeze(0)
    common = _of_both_ways(group, experts.num_experts, most_tokens)
    communicator: Any = group.coordinator.device_communicator
    rows, scales, assist, tokens_per_expert, ends, _, row_weights = communicator.launch_own(
        partial(
            torch_npu.npu_moe_distribute_dispatch_v2,
            x,
            topk_ids,
            expert_scales=topk_weights if group.limits.weights_at_dispatch else None,
            quant_mode=DYNAMIC if experts.takes_integers else NOT_QUANTIZED,
            expert_token_nums_type=COUNTS,
            **common,
        )
    )
    dispatched()
    if experts.takes_integers:
        results = experts.grouped_integers(rows, scales, tokens_per_expert)
    else:
        results = experts.grouped(rows, tokens_per_expert)
    computed()
    (sums,) = communicator.launch_own(
        lambda: (
            torch_npu.npu_moe_distribute_combine_v2(
                results,
                topk_ids,
                assist,
                ends,
                topk_weights,
                expand_scales=row_weights if group.limits.weights_at_dispatch else None,
                **common,
            ),
        )
    )
    return sums[:num_tokens]


def _of_both_ways(group: FusedGroup, num_experts: int, most_tokens: int) -> dict[str, Any]:
    """Arguments of both launches. Shared experts are the model's own, on every rank."""
    world_size = group.coordinator.world_size
    return {
        "group_ep": group.name,
        "ep_world_size": world_size,
        "ep_rank_id": group.coordinator.rank_in_group,
        "moe_expert_num": num_experts,
        "shared_expert_num": 0,
        "shared_expert_rank_num": 0,
        "global_bs": most_tokens * world_size,
        "comm_alg": group.limits.communication,
    }
