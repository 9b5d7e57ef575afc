"""Tokens in rows of their own to the ranks of their experts, and the experts' results back."""

from typing import TYPE_CHECKING, Any

import torch
import torch_npu
from vllm.distributed.parallel_state import GroupCoordinator

from vllm_davinci.core.fused_moe.beside import ALONE, Beside
from vllm_davinci.core.fused_moe.experts import COUNTS, sort_by_expert, sum_by_token
from vllm_davinci.core.fused_moe.row_counts import CountsWait, RowCounts

if TYPE_CHECKING:
    from vllm_davinci.core.fused_moe.forward import RoutedForward


def all_to_all(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    forward: "RoutedForward",
    group: GroupCoordinator,
    counts_wait: CountsWait,
    beside: Beside = ALONE,
) -> torch.Tensor:
    """The routed sum of tokens that no other rank of the group has.

    x: [num_tokens, hidden_size]; router_logits: [num_tokens, num_experts]
    group: the ranks among which experts are dealt out
    Returns [num_tokens, hidden_size]: whole sums, or parts where ranks share experts.

    The collective takes row counts on the host, which waits for them once per layer. In a
    ubatch the counts travel on the communication stream, so that the wait is over while the
    device still computes what the other ubatches have launched, and the rows leave in front
    of theirs.
    """
    comm: Any = group.device_communicator
    experts = forward.experts
    topk_weights, topk_ids = forward.choose(x, router_logits)
    beside.chosen()
    weight_on_input = forward.weight_on_input
    weighted = x * topk_weights if weight_on_input else x
    rows, row_of_assignment, counts = sort_by_expert(
        weighted, topk_ids, experts.num_experts, 0, experts.num_experts
    )
    # [rank, its local expert]: rows from here; then [rank, local expert]: rows to here
    sent = counts.view(group.world_size, experts.num_local)

    def count() -> tuple[torch.Tensor, RowCounts]:
        received = comm.all_to_all(sent)
        return received, RowCounts(sent, received)

    def move(
        counted: tuple[torch.Tensor, RowCounts],
    ) -> tuple[torch.Tensor, torch.Tensor, list[int], list[int]]:
        received, on_host = counted
        input_sizes, output_sizes = on_host.wait(counts_wait, group)
        arrived = comm.all_to_all(rows, output_sizes, input_sizes)
        return received, arrived, input_sizes, output_sizes

    received, arrived, input_sizes, output_sizes = comm.sized_exchange(count, move)
    beside.dispatched()
    computed = arrived
    if sum(output_sizes):
        by_expert, _, source, tokens_per_expert = torch_npu.npu_moe_re_routing(
            arrived, received, expert_token_num_type=COUNTS
        )
        results = experts.grouped(by_expert, tokens_per_expert)
        # In the order of arrival again, from which everybody knows their own.
        computed = torch.empty_like(results).index_copy_(0, source.to(torch.int64), results)
    beside.computed()
    returned = comm.all_to_all(computed, input_sizes, output_sizes)
    if weight_on_input:
        topk_weights = torch.ones_like(topk_weights)
    return sum_by_token(returned, row_of_assignment, topk_weights)
