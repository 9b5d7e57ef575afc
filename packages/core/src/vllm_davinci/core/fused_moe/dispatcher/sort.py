"""Sorts rows by expert and sums them by token again: both ends of every dispatch."""

import torch
import torch_npu

from vllm_davinci.core.fused_moe.dispatcher.base import RankExperts, SelectedTokens

COUNTS = 1  # expert_tokens_num_type: entries are counts, not ends
# quant_mode of npu_moe_init_routing_v2: none, or a scale for each row.
NOT_QUANTIZED, DYNAMIC = -1, 1
# drop_pad_mode of npu_moe_finalize_routing in which assignments are ordered by token and row -1
# means that an assignment has no row here.
ROWS_MAY_BE_ABSENT = 3


def sort_by_expert(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    num_experts: int,
    first: int,
    num_local: int,
    quantized: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Copies tokens, sorted by expert, for experts [first, first + num_local).

    x:         [num_tokens, hidden_size]
    topk_ids:  [num_tokens, top_k], int32
    quantized: whether the same launch quantizes rows to int8
    Returns
      rows:              [num_tokens * top_k, hidden_size]; rows after the counted ones are
                         undefined
      row_of_assignment: [num_tokens * top_k], int32: row of each choice of a token, or -1
      tokens_per_expert: [num_local], int64
      scales:            [num_tokens * top_k], fp32, of quantized rows; None for others
    """
    rows, row_of_assignment, tokens_per_expert, scales = torch_npu.npu_moe_init_routing_v2(
        x,
        topk_ids,
        active_num=topk_ids.numel(),
        expert_num=num_experts,
        expert_tokens_num_type=COUNTS,
        expert_tokens_num_flag=True,
        active_expert_range=[first, first + num_local],
        quant_mode=DYNAMIC if quantized else NOT_QUANTIZED,
    )
    return rows, row_of_assignment, tokens_per_expert, scales if quantized else None


def slots_of_rows(slots: torch.Tensor, row_of_assignment: torch.Tensor) -> torch.Tensor:
    """The adapter slot of each row; -1 for a row without a token.

    slots:             [num_tokens], int32
    row_of_assignment: [num_tokens * top_k], int32, token by token, -1 for none
    Returns [num_tokens * top_k], int32.
    """
    num_rows = row_of_assignment.shape[0]
    of_assignment = slots.unsqueeze(1).expand(-1, num_rows // slots.shape[0]).reshape(-1)
    found = slots.new_full((num_rows + 1,), -1)  # last entry: for assignments without a row
    found.scatter_(0, row_of_assignment.to(torch.int64).remainder(num_rows + 1), of_assignment)
    return found[:num_rows]


def sort_for_all_ranks(
    tokens: SelectedTokens, experts: RankExperts, sends_integers: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Sorts rows for the experts of all ranks, to be sent; returns the same as `sort_by_expert`.

    sends_integers: whether rows for int8 experts are sent as int8
    """
    return sort_by_expert(
        tokens.x,
        tokens.topk_ids,
        experts.num_experts,
        0,
        experts.num_experts,
        quantized=sends_integers and experts.takes_integers,
    )


def sum_by_token(
    rows: torch.Tensor, row_of_assignment: torch.Tensor, topk_weights: torch.Tensor
) -> torch.Tensor:
    """The weighted sum of each token's rows, in fp32, without assignments that have no row.

    rows:              [num_rows, hidden_size]
    row_of_assignment: [num_tokens * top_k], int32, -1 for none
    topk_weights:      [num_tokens, top_k]
    Returns [num_tokens, hidden_size] with the dtype of rows.
    """
    return torch_npu.npu_moe_finalize_routing(
        rows.unsqueeze(0),
        None,
        None,
        None,
        topk_weights,
        row_of_assignment,
        None,
        drop_pad_mode=ROWS_MAY_BE_ABSENT,
    )
