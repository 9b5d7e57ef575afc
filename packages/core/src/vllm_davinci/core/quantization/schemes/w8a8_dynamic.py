"""W8A8_DYNAMIC: int8 products with a scale per token.

s = max|x| / 127 per token, xq = round(x / s)
y = (xq * weight^T) * weight_scale * s + bias
Sums are int32, scaling is fp32, the result is rounded once to the input's dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch_npu
from vllm.model_executor.layers.linear import MergedColumnParallelLinear

from vllm_davinci import operators
from vllm_davinci.core.device.refusals import refusal_of
from vllm_davinci.core.fused_moe.layer import NPURoutedExperts
from vllm_davinci.core.fused_moe.local_experts import (
    Experts,
    RowDeltas,
    grouped_matmul,
)
from vllm_davinci.core.layers.quantized_activation import (
    InputScale,
    Output,
    OutputKind,
    QuantizedActivation,
    Readers,
    TracedActivation,
    quantize,
)
from vllm_davinci.core.quantization.experts_method import QuantizedFusedMoEMethodBase, loaded
from vllm_davinci.core.quantization.linear_method import QuantizedLinearMethodBase, plain_tensor
from vllm_davinci.core.quantization.quant_matmul import (
    Int8Scheme,
    QuantMatmul,
    arrange_weight,
    per_token_quant_matmul,
)
from vllm_davinci.core.quantization.rounding import FloatLayer, stored_per_channel
from vllm_davinci.core.quantization.scheme import SCHEMES, LayerSettings, Scheme
from vllm_davinci.core.quantization.tensors import INT8_WEIGHT, PER_CHANNEL

DYNAMIC = 1  # quant_mode of npu_dequant_swiglu_quant: a scale per row


class W8A8DynamicLinearMethod(QuantizedLinearMethodBase):
    """int8 weight, every token quantized with its own scale.

    `output` is set once, after loading (`resolve_outputs`). SUMS leaves scaling to the gated
    activation that follows, which does it in its own launch.
    """

    def __init__(self, scheme: Scheme, prefix: str, settings: LayerSettings) -> None:
        super().__init__(scheme, prefix, settings)
        self._may_return_sums = False
        self.output: Output = OutputKind.FLOAT

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        super().process_weights_after_loading(layer)
        self._weight = arrange_weight(layer.get_parameter("weight"), self.settings.use_nz)
        self._weight_scale = plain_tensor(layer, "weight_scale").flatten().to(torch.float32)
        has_bias = getattr(layer, "bias", None) is not None  # a bias in floats
        self.quant_matmul = (
            None if has_bias else QuantMatmul(self._weight, self._weight_scale, None, None)
        )
        # A gated activation reads a gate and its factor from one product.
        self._may_return_sums = not has_bias and isinstance(layer, MergedColumnParallelLinear)

    def can_return(self, kind: OutputKind | InputScale) -> bool:
        """True if `apply` can return that kind of output; call it after loading."""
        return kind is OutputKind.SUMS and self._may_return_sums

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x: [..., in_features]. Returns [..., out_features] of the same dtype.

        Returns a QuantizedActivation if `output` says so.
        """
        if self.output is OutputKind.SUMS and bias is None and x.dim() == 2:
            integers, scales = quantize(x)
            sums = torch_npu.npu_quant_matmul(
                integers, self._weight, self._weight_scale, output_dtype=torch.int32
            )
            return QuantizedActivation(sums, scales, x.dtype, self._weight_scale)
        result = per_token_quant_matmul(x, self._weight, self._weight_scale, bias)
        return TracedActivation(result, self.output) if isinstance(self.output, Readers) else result


class W8A8DynamicFusedMoEMethod(QuantizedFusedMoEMethodBase):
    """int8 weights, every token quantized with its own scale."""

    def _experts(self, layer: NPURoutedExperts, **place: Any) -> Experts:
        gate_up_scale = loaded(layer, "w13_weight_scale").squeeze(-1)
        product_scale = None
        takes_integers = place["activation"].is_plain and (
            gate_up_scale.device.type != "npu" or activation_takes_integers(*gate_up_scale.shape)
        )
        if not takes_integers:
            product_scale = _as_product_takes(gate_up_scale, self._dtype)
        return DynamicExperts(
            gate_up=self.arranged(layer.w13_weight),
            gate_up_scale=gate_up_scale,
            down=self.arranged(layer.w2_weight),
            down_scale=_as_product_takes(loaded(layer, "w2_weight_scale").squeeze(-1), self._dtype),
            dtype=self._dtype,
            product_scale=product_scale,
            **place,
        )


@dataclass(frozen=True, kw_only=True)
class DynamicExperts(Experts):
    """Gated experts with int8 weights; every row is quantized with its own scale.

    Quantizes the input and between the products, without rounding to 16 bits in between.
    gate_up:       [num_local, hidden_size, 2 * intermediate_size] int8, gate before up
    gate_up_scale: [num_local, 2 * intermediate_size] fp32
    down:          [num_local, intermediate_size, hidden_size] int8
    down_scale:    [num_local, hidden_size], in the product's dtype: bf16 for a bf16 result, else
                   fp32
    dtype:         of the result
    product_scale: gate_up_scale in the dtype of down_scale if the activation supports no integers
                   of this size or is not plain, so that the first product returns 16-bit numbers;
                   else None
    """

    takes_integers: ClassVar[bool] = True
    fused_ops = (operators.experts_w8a8, operators.routed_experts_w8a8)
    takes_adapters: ClassVar[bool] = True
    rounds_otherwise_adapted: ClassVar[bool] = True

    gate_up: torch.Tensor
    gate_up_scale: torch.Tensor
    down: torch.Tensor
    down_scale: torch.Tensor
    dtype: torch.dtype
    product_scale: torch.Tensor | None = None

    @property
    def _weights(self) -> dict[str, torch.Tensor]:
        return {
            "gate_up": self.gate_up,
            "gate_up_scale": self.gate_up_scale,
            "down": self.down,
            "down_scale": self.down_scale,
        }

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
            gate_up = self._gate_up(rows, scales, tokens_per_expert, self.product_scale)
            activated = self.activation(gate_up)
            activated, activated_scales = torch_npu.npu_dynamic_quant(activated)
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

    def compute_adapted(
        self, rows: torch.Tensor, tokens_per_expert: torch.Tensor, deltas: RowDeltas | None
    ) -> torch.Tensor:
        """See Experts.compute_adapted. Values between the products have `dtype`."""
        scale = _as_product_takes(self.gate_up_scale, self.dtype)
        integers, scales = torch_npu.npu_dynamic_quant(rows)
        gate_up = self._gate_up(integers, scales, tokens_per_expert, scale)
        if deltas is not None:
            deltas.add_to_gate_up(gate_up, rows)
        activated = self.activation(gate_up)
        rounded, rounded_scales = torch_npu.npu_dynamic_quant(activated)
        result = self._down(rounded, rounded_scales, tokens_per_expert)
        return result if deltas is None else deltas.add_to_down(result, activated)

    def _gate_up(
        self,
        rows: torch.Tensor,
        scales: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        scale: torch.Tensor,
    ) -> torch.Tensor:
        """rows: int8; scale: of the weight, in the product's dtype. Returns `dtype`."""
        return grouped_matmul(
            rows,
            self.gate_up,
            tokens_per_expert,
            self.dtype,
            scale=[scale],
            per_token_scale=[scales],
        )

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
    """True if the gated activation supports int32 sums, [rows, columns] in groups of experts.

    The supported sizes depend on the CANN release: multiples of 64, up to 7232 or 10496.
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


def _as_product_takes(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Converts a weight's scale for the grouped product: bf16 for a bf16 result, else fp32.

    scale: fp32
    """
    return scale.to(torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)


@SCHEMES.register
class W8A8Dynamic(Int8Scheme):
    name = "W8A8_DYNAMIC"
    parameters = (INT8_WEIGHT, *PER_CHANNEL)
    linear_method = W8A8DynamicLinearMethod
    experts_method = W8A8DynamicFusedMoEMethod

    def floats(self, tensor: Callable[[str], torch.Tensor]) -> torch.Tensor:
        return tensor("weight").float() * tensor("weight_scale").float()

    def seen(self, inputs: torch.Tensor, tensor: Callable[[str], torch.Tensor]) -> torch.Tensor:
        scale = inputs.abs().amax(-1, keepdim=True) / 127
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
        return (inputs / scale).round_() * scale

    def rounded(self, layer: FloatLayer) -> dict[str, torch.Tensor]:
        return stored_per_channel(layer.weight)
