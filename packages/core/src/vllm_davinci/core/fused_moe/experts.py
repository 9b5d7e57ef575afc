"""The expert stage, from routed tokens to their sums: one function that others can replace."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch_npu

from vllm_davinci.core.components.fused_ops import compiled
from vllm_davinci.core.fused_moe.beside import ALONE, Beside

SPLIT_ROWS = 0  # group_type of npu_grouped_matmul: groups are runs of x's rows
SINGLE_OUTPUT = 2  # split_item: one tensor holds all groups' rows
COUNTS = 1  # group_list_type and expert_tokens_num_type: entries are counts, not ends
# drop_pad_mode of npu_moe_finalize_routing in which assignments are numbered token by token and
# row -1 means that an assignment has no row here.
ROWS_MAY_BE_ABSENT = 3


class StageOfLogits(NamedTuple):
    """A compiled operator that chooses experts and computes them.

    weights: the operator's arguments between the correction bias and the rule
    """

    operator: Callable[..., torch.Tensor]
    weights: tuple[torch.Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Experts(ABC):
    """The experts of this rank, in whatever precision they are stored.

    first, num_local: this rank holds the physical experts [first, first + num_local) of
                      num_experts

    A subclass gives `grouped`; one that a compiled operator computes overrides `routed` and
    `stage_of_logits` too, and one that computes on int8 rows `grouped_integers`.
    """

    takes_integers: ClassVar[bool] = False

    first: int
    num_local: int
    num_experts: int

    def routed(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        beside: Beside = ALONE,
    ) -> torch.Tensor:
        """The whole stage: the weighted sum of every token's experts that are on this rank.

        x:            [num_tokens, hidden_size]
        topk_weights: [num_tokens, top_k], dtype of x
        topk_ids:     [num_tokens, top_k], int32, physical expert numbers over all ranks
        beside:       is told when rows are sorted and when the products are launched
        Returns a new tensor shaped like x: zeros for a token without experts here.
        Two launches beside `grouped`; the host waits for nothing.
        """
        rows, row_of_assignment, tokens_per_expert = sort_by_expert(
            x, topk_ids, self.num_experts, self.first, self.num_local
        )
        beside.dispatched()
        results = self.grouped(rows, tokens_per_expert)
        beside.computed()
        return sum_by_token(results, row_of_assignment, topk_weights)

    def stage_of_logits(self, dtype: torch.dtype) -> StageOfLogits | None:
        """The choice of experts and `routed` in one call, for tokens of `dtype`, where there is."""
        return None

    @abstractmethod
    def grouped(self, rows: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
        """Each row through the expert it belongs to.

        rows:              [num_rows, hidden_size], sorted by expert
        tokens_per_expert: [num_local], int64, on the device; rows after their sum belong to none
        Returns [num_rows, hidden_size]; rows that belong to no expert hold anything.
        """

    def grouped_integers(
        self, rows: torch.Tensor, scales: torch.Tensor, tokens_per_expert: torch.Tensor
    ) -> torch.Tensor:
        """`grouped` of rows that are quantized already, where `takes_integers`.

        rows: [num_rows, hidden_size] int8; scales: [num_rows] fp32
        """
        raise NotImplementedError(f"{type(self).__name__} computes on unquantized rows.")


@dataclass(frozen=True, kw_only=True)
class FloatExperts(Experts):
    """Gated experts with unquantized weights.

    gate_up: [num_local, hidden_size, 2 * intermediate_size], gate before up
    down:    [num_local, intermediate_size, hidden_size]
    """

    gate_up: torch.Tensor
    down: torch.Tensor

    def routed(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        beside: Beside = ALONE,
    ) -> torch.Tensor:
        """See Experts.routed."""
        stage = compiled("experts") if beside is ALONE else None
        if stage is None:
            return super().routed(x, topk_weights, topk_ids, beside)
        return stage(
            x, topk_weights, topk_ids, self.gate_up, self.down, self.first, self.num_experts
        )

    def stage_of_logits(self, dtype: torch.dtype) -> StageOfLogits | None:
        """See Experts.stage_of_logits."""
        operator = compiled("routed_experts")
        return None if operator is None else StageOfLogits(operator, (self.gate_up, self.down))

    def grouped(self, rows: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
        """See Experts.grouped. Three launches."""
        gate_up = grouped_matmul(rows, self.gate_up, tokens_per_expert)
        return grouped_matmul(torch_npu.npu_swiglu(gate_up), self.down, tokens_per_expert)


def sort_by_expert(
    x: torch.Tensor, topk_ids: torch.Tensor, num_experts: int, first: int, num_local: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copies of the tokens, in the order of their experts, for [first, first + num_local).

    x:        [num_tokens, hidden_size]
    topk_ids: [num_tokens, top_k], int32
    Returns
      rows:              [num_tokens * top_k, hidden_size]; rows after those counted hold anything
      row_of_assignment: [num_tokens * top_k], int32: where each of a token's choices went, or -1
      tokens_per_expert: [num_local], int64
    """
    rows, row_of_assignment, tokens_per_expert, _ = torch_npu.npu_moe_init_routing_v2(
        x,
        topk_ids,
        active_num=topk_ids.numel(),
        expert_num=num_experts,
        expert_tokens_num_type=COUNTS,
        expert_tokens_num_flag=True,
        active_expert_range=[first, first + num_local],
    )
    return rows, row_of_assignment, tokens_per_expert


def sum_by_token(
    rows: torch.Tensor, row_of_assignment: torch.Tensor, topk_weights: torch.Tensor
) -> torch.Tensor:
    """The weighted sum of each token's rows, in fp32, leaving out assignments without a row.

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


def grouped_matmul(
    rows: torch.Tensor, weight: torch.Tensor, tokens_per_expert: torch.Tensor
) -> torch.Tensor:
    """rows [num_rows, k] times each row's expert's weight [num_local, k, n]: [num_rows, n]."""
    return torch_npu.npu_grouped_matmul(
        [rows],
        [weight],
        group_list=tokens_per_expert,
        split_item=SINGLE_OUTPUT,
        group_type=SPLIT_ROWS,
        group_list_type=COUNTS,
    )[0]
