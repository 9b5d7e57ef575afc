"""Routed experts on int8 products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch_npu

from vllm_davinci.core.components.fused_ops import compiled
from vllm_davinci.core.fused_moe.beside import ALONE, Beside
from vllm_davinci.core.fused_moe.experts import (
    COUNTS,
    SINGLE_OUTPUT,
    SPLIT_ROWS,
    Experts,
    StageOfLogits,
    sum_by_token,
)

DYNAMIC = 1  # quant_mode of the routing and activation operators: a scale per row


@dataclass(frozen=True, kw_only=True)
class DynamicExperts(Experts):
    """Gated experts with int8 weights; every row is quantized with its own scale.

    One quantization on the way in, one between the products, and nothing rounded to 16 bits there.
    gate_up:       [num_local, hidden_size, 2 * intermediate_size] int8, gate before up
    gate_up_scale: [num_local, 2 * intermediate_size] fp32
    down:          [num_local, intermediate_size, hidden_size] int8
    down_scale:    [num_local, hidden_size], in the dtype the product takes: that of a bf16 result,
                   else fp32
    dtype:         of the result
    """

    takes_integers: ClassVar[bool] = True

    gate_up: torch.Tensor
    gate_up_scale: torch.Tensor
    down: torch.Tensor
    down_scale: torch.Tensor
    dtype: torch.dtype

    def routed(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        beside: Beside = ALONE,
    ) -> torch.Tensor:
        """See Experts.routed. Rows are quantized by the launch that sorts them: five in all."""
        at_once = compiled("experts_w8a8") if beside is ALONE and x.dtype == self.dtype else None
        if at_once is not None:
            return at_once(
                x,
                topk_weights,
                topk_ids,
                *self._weights,
                self.first,
                self.num_experts,
            )
        rows, row_of_assignment, tokens_per_expert, scales = torch_npu.npu_moe_init_routing_v2(
            x,
            topk_ids,
            active_num=topk_ids.numel(),
            expert_num=self.num_experts,
            expert_tokens_num_type=COUNTS,
            expert_tokens_num_flag=True,
            active_expert_range=[self.first, self.first + self.num_local],
            quant_mode=DYNAMIC,
        )
        beside.dispatched()
        results = self.grouped_integers(rows, scales, tokens_per_expert)
        beside.computed()
        return sum_by_token(results, row_of_assignment, topk_weights)

    @property
    def _weights(self) -> tuple[torch.Tensor, ...]:
        """As the compiled operators take them."""
        return self.gate_up, self.gate_up_scale, self.down, self.down_scale

    def stage_of_logits(self, dtype: torch.dtype) -> StageOfLogits | None:
        """See Experts.stage_of_logits."""
        operator = compiled("routed_experts_w8a8") if dtype == self.dtype else None
        return None if operator is None else StageOfLogits(operator, self._weights)

    def grouped(self, rows: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
        """See Experts.grouped. Four launches."""
        integers, scales = torch_npu.npu_dynamic_quant(rows)
        return self.grouped_integers(integers, scales, tokens_per_expert)

    def grouped_integers(
        self, rows: torch.Tensor, scales: torch.Tensor, tokens_per_expert: torch.Tensor
    ) -> torch.Tensor:
        """See Experts.grouped_integers. Three launches."""
        sums = _grouped_matmul(rows, self.gate_up, tokens_per_expert, torch.int32)
        activated, activated_scales = torch_npu.npu_dequant_swiglu_quant(
            sums,
            weight_scale=self.gate_up_scale,
            activation_scale=scales,
            group_index=tokens_per_expert,
            activate_left=True,
            quant_mode=DYNAMIC,
        )
        return _grouped_matmul(
            activated,
            self.down,
            tokens_per_expert,
            self.dtype,
            scale=[self.down_scale],
            per_token_scale=[activated_scales],
        )


@dataclass(frozen=True, kw_only=True)
class StaticProjection:
    """One projection of all experts, with each expert's input scale from the checkpoint.

    weight:       [num_local, in, out] int8
    input_scale:  [num_local, 1] fp32
    input_offset: [num_local, 1] fp32
    deq_scale:    [num_local, out] fp32, or its bits as int64
    quant_bias:   [num_local, out] int32, or None where another rank of the sum adds it
    """

    weight: torch.Tensor
    input_scale: torch.Tensor
    input_offset: torch.Tensor
    deq_scale: torch.Tensor
    quant_bias: torch.Tensor | None

    def __call__(
        self, rows: torch.Tensor, expert_of_row: torch.Tensor, tokens_per_expert: torch.Tensor
    ) -> torch.Tensor:
        """rows: [num_rows, in]; expert_of_row: [num_rows], int64. Returns [num_rows, out]."""
        scaled = rows.float() / self.input_scale[expert_of_row] + self.input_offset[expert_of_row]
        integers = scaled.round().clamp(-128, 127).to(torch.int8)
        bias = {} if self.quant_bias is None else {"bias": [self.quant_bias]}
        return _grouped_matmul(
            integers, self.weight, tokens_per_expert, rows.dtype, scale=[self.deq_scale], **bias
        )


@dataclass(frozen=True, kw_only=True)
class StaticExperts(Experts):
    """Gated experts with int8 weights and input scales of their own."""

    gate_up: StaticProjection
    down: StaticProjection

    def grouped(self, rows: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
        """See Experts.grouped."""
        ends = tokens_per_expert.cumsum(0)
        number = torch.arange(len(rows), device=rows.device)
        # How many experts end at or before the row; rows after the last take its scales.
        expert_of_row = (number.unsqueeze(1) >= ends).sum(1).clamp_max(self.num_local - 1)
        gate_up = self.gate_up(rows, expert_of_row, tokens_per_expert)
        return self.down(torch_npu.npu_swiglu(gate_up), expert_of_row, tokens_per_expert)


def _grouped_matmul(
    rows: torch.Tensor,
    weight: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    dtype: torch.dtype,
    **scales: list[torch.Tensor],
) -> torch.Tensor:
    result: torch.Tensor = torch_npu.npu_grouped_matmul(
        [rows],
        [weight],
        group_list=tokens_per_expert,
        split_item=SINGLE_OUTPUT,
        group_type=SPLIT_ROWS,
        group_list_type=COUNTS,
        output_dtype=dtype,
        **scales,
    )[0]
    return result
