"""Routed experts with integer weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch_npu

from vllm_davinci.core.device.refusals import refusal_of
from vllm_davinci.core.fused_moe.experts import Experts, grouped_matmul

DYNAMIC = 1  # quant_mode of npu_dequant_swiglu_quant: a scale per row


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
    product_scale: gate_up_scale in the dtype of down_scale where the activation takes no integers
                   of this size, else None: the first product then returns 16-bit numbers
    """

    takes_integers: ClassVar[bool] = True
    fused_ops: ClassVar[tuple[str, str] | None] = ("experts_w8a8", "routed_experts_w8a8")

    gate_up: torch.Tensor
    gate_up_scale: torch.Tensor
    down: torch.Tensor
    down_scale: torch.Tensor
    dtype: torch.dtype
    product_scale: torch.Tensor | None = None

    @property
    def _weights(self) -> tuple[torch.Tensor, ...]:
        return self.gate_up, self.gate_up_scale, self.down, self.down_scale

    def _operator(self, number: int, dtype: torch.dtype) -> Callable[..., Any] | None:
        if dtype != self.dtype or self.product_scale is not None:
            return None
        return super()._operator(number, dtype)

    def _compute(
        self, rows: torch.Tensor, tokens_per_expert: torch.Tensor, scales: torch.Tensor | None
    ) -> torch.Tensor:
        """See Experts.__call__. Three launches, and one for rows that are not quantized yet."""
        if scales is None:
            rows, scales = torch_npu.npu_dynamic_quant(rows)
        if self.product_scale is not None:
            gate_up = grouped_matmul(
                rows,
                self.gate_up,
                tokens_per_expert,
                self.dtype,
                scale=[self.product_scale],
                per_token_scale=[scales],
            )
            activated, activated_scales = torch_npu.npu_dynamic_quant(torch_npu.npu_swiglu(gate_up))
            return self._down(activated, activated_scales, tokens_per_expert)
        sums = grouped_matmul(rows, self.gate_up, tokens_per_expert, torch.int32)
        activated, activated_scales = torch_npu.npu_dequant_swiglu_quant(
            sums,
            weight_scale=self.gate_up_scale,
            activation_scale=scales,
            group_index=tokens_per_expert,
            activate_left=True,
            quant_mode=DYNAMIC,
        )
        return self._down(activated, activated_scales, tokens_per_expert)

    def _down(
        self, rows: torch.Tensor, scales: torch.Tensor, tokens_per_expert: torch.Tensor
    ) -> torch.Tensor:
        return grouped_matmul(
            rows,
            self.down,
            tokens_per_expert,
            self.dtype,
            scale=[self.down_scale],
            per_token_scale=[scales],
        )


@functools.cache
def activation_takes_integers(num_experts: int, columns: int) -> bool:
    """Whether the gated activation takes int32 sums, [rows, columns] in groups of experts.

    It does so for sizes that depend on the release of CANN: multiples of 64, up to 7232 or 10496.
    """

    def activate() -> None:
        # A model is built under its own default dtype.
        new = functools.partial(torch.zeros, device="npu", dtype=torch.float32)
        torch_npu.npu_dequant_swiglu_quant(
            new(1, columns, dtype=torch.int32),
            weight_scale=new(num_experts, columns),
            activation_scale=new(1),
            group_index=new(num_experts, dtype=torch.int64),
            activate_left=True,
            quant_mode=DYNAMIC,
        )

    return refusal_of(activate) is None


@dataclass(frozen=True, kw_only=True)
class StaticProjection:
    """One projection of all experts, with each expert's input scale from the checkpoint.

    The product's sums are scaled here: the grouped product itself takes a scale in bf16 only for a
    bf16 result, which has too few bits for this one.

    weight:       [num_local, in, out] int8
    input_scale:  [num_local, 1] fp32
    input_offset: [num_local, 1] fp32
    deq_scale:    [num_local, out] fp32
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
        sums = grouped_matmul(integers, self.weight, tokens_per_expert, torch.int32, **bias)
        return (sums.float() * self.deq_scale[expert_of_row]).to(rows.dtype)


@dataclass(frozen=True, kw_only=True)
class StaticExperts(Experts):
    """Gated experts with int8 weights and input scales of their own."""

    gate_up: StaticProjection
    down: StaticProjection

    def _compute(
        self, rows: torch.Tensor, tokens_per_expert: torch.Tensor, scales: torch.Tensor | None
    ) -> torch.Tensor:
        """See Experts.__call__."""
        assert scales is None, "rows are quantized here, with their expert's scale"
        ends = tokens_per_expert.cumsum(0)
        number = torch.arange(len(rows), device=rows.device)
        # How many experts end at or before the row; rows after the last take its scales.
        expert_of_row = (number.unsqueeze(1) >= ends).sum(1).clamp_max(self.num_local - 1)
        gate_up = self.gate_up(rows, expert_of_row, tokens_per_expert)
        return self.down(torch_npu.npu_swiglu(gate_up), expert_of_row, tokens_per_expert)


@dataclass(frozen=True, kw_only=True)
class WeightOnlyProjection:
    """One projection of all experts, whose integers the product turns into the rows' dtype.

    weight: [num_local, in, out] int8, or [num_local, in, out / 8] int32, see `weight_only`
    scale:  [num_local, out] or [num_local, groups, out], dtype of the rows
    offset: as scale, added to the integers
    """

    weight: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor

    def __call__(self, rows: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
        """rows: [num_rows, in]. Returns [num_rows, out]."""
        return grouped_matmul(
            rows,
            self.weight,
            tokens_per_expert,
            antiquant_scale=[self.scale],
            antiquant_offset=[self.offset],
        )


@dataclass(frozen=True, kw_only=True)
class WeightOnlyExperts(Experts):
    """Gated experts with integer weights and rows of 16-bit floats."""

    gate_up: WeightOnlyProjection
    down: WeightOnlyProjection

    def _compute(
        self, rows: torch.Tensor, tokens_per_expert: torch.Tensor, scales: torch.Tensor | None
    ) -> torch.Tensor:
        """See Experts.__call__. Three launches."""
        assert scales is None, "rows are floats here"
        gate_up = self.gate_up(rows, tokens_per_expert)
        return self.down(torch_npu.npu_swiglu(gate_up), tokens_per_expert)
