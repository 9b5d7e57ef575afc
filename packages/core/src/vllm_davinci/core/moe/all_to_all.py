"""Tokens in rows of their own to the ranks of their experts, and the experts' results back."""

from typing import TYPE_CHECKING, Any

import torch
import torch_npu
from vllm.distributed.parallel_state import GroupCoordinator

from vllm_davinci.core.moe.beside import ALONE, Beside
from vllm_davinci.core.moe.experts import COUNTS, sort_by_expert, sum_by_token

if TYPE_CHECKING:
    from vllm_davinci.core.moe.forward import RoutedForward


def all_to_all(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    forward: "RoutedForward",
    group: GroupCoordinator,
    beside: Beside = ALONE,
) -> torch.Tensor:
    """The routed sum of tokens that no other rank of the group has.

    x: [num_tokens, hidden_size]; router_logits: [num_tokens, num_experts]
    group: the ranks among which experts are dealt out
    Returns [num_tokens, hidden_size]: whole sums, or parts where ranks share experts.

    The collective takes row counts on the host. Their copy is asynchronous, and the host waits for
    it right before it needs them: the one wait of a layer.
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
    received = comm.all_to_all(sent)
    input_sizes, output_sizes = RowCounts(sent, received).wait()
    arrived = comm.all_to_all(rows, output_sizes, input_sizes)
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


class RowCounts:
    """Rows to and from each rank, on their way to the host."""

    def __init__(self, sent: torch.Tensor, received: torch.Tensor) -> None:
        """sent, received: [world_size, num_local], int64, on the device."""
        sums = torch.stack((sent.sum(1), received.sum(1)))
        self._on_host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
        self._on_host.copy_(sums, non_blocking=True)
        self._arrival = torch_npu.npu.Event()
        self._arrival.record()

    def wait(self) -> tuple[list[int], list[int]]:
        """Rows for each rank, and rows from each."""
        self._arrival.synchronize()
        sent, received = self._on_host.tolist()
        return sent, received
