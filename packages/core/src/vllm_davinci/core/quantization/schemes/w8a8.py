"""W8A8: int8 products whose input is quantized with the scale and offset of the checkpoint.

xq = clamp(round(x / input_scale + input_offset), -128, 127)
y  = (xq * weight^T + quant_bias) * deq_scale
Sums are int32, scaling is fp32, the result is rounded once to the input's dtype. A layer has no
separate weight scale: deq_scale is the weight scale times input_scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch_npu
from vllm.model_executor.layers.linear import RowParallelLinear

from vllm_davinci.core.errors import CheckpointError
from vllm_davinci.core.fused_moe.layer import NPURoutedExperts
from vllm_davinci.core.fused_moe.local_experts import (
    Experts,
    ExpertsOfFloats,
    Product,
    grouped_matmul,
)
from vllm_davinci.core.layers.quantized_activation import InputScale
from vllm_davinci.core.quantization.experts_method import QuantizedFusedMoEMethodBase, loaded
from vllm_davinci.core.quantization.linear_method import QuantizedLinearMethodBase, plain_tensor
from vllm_davinci.core.quantization.quant_matmul import (
    Int8Scheme,
    QuantMatmul,
    arrange_weight,
)
from vllm_davinci.core.quantization.rounding import (
    FloatLayer,
    rounded_per_channel,
    scale_and_offset,
)
from vllm_davinci.core.quantization.scheme import SCHEMES, Layout
from vllm_davinci.core.quantization.tensors import (
    INT8_WEIGHT,
    PER_CHANNEL,
    Extent,
    TensorSpec,
    bits_from_float,
    deq_scale_as_float,
)

STATIC_TENSORS = (
    INT8_WEIGHT,
    TensorSpec("input_scale", Extent.ONE),
    # fp32 today; earlier exporters wrote the model's dtype, others int8.
    TensorSpec(
        "input_offset",
        Extent.ONE,
        (torch.int8, torch.int32, torch.float16, torch.bfloat16, torch.float32),
        loaded_as=torch.int32,
    ),
    # int64: for FP16 models, and if ModelSlim does not know the dtype.
    TensorSpec("deq_scale", Extent.CHANNELS, (torch.float32, torch.int64), has_bits=True),
    TensorSpec("quant_bias", Extent.CHANNELS, (torch.int32,)),
)


class W8A8LinearMethod(QuantizedLinearMethodBase):
    """int8 weight, input quantized with the scale and offset of the checkpoint."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        super().process_weights_after_loading(layer)
        # The ranks of a row-parallel layer are summed; the bias must be added once.
        adds_bias = not isinstance(layer, RowParallelLinear) or layer.tp_rank == 0
        self._product = self.quant_matmul = QuantMatmul(
            weight=arrange_weight(layer.get_parameter("weight"), self.settings.use_nz),
            scale=plain_tensor(layer, "deq_scale"),
            bias=plain_tensor(layer, "quant_bias") if adds_bias else None,
            input_scale=InputScale.of(
                self._one_of(layer, "input_scale").to(torch.float32),
                self._one_of(layer, "input_offset").to(torch.int32),
            ),
        )

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x: [..., in_features]. Returns [..., out_features] of the same dtype.

        bias: not used; the export folded it into quant_bias
        """
        product = self._product
        result: torch.Tensor = torch_npu.npu_quant_matmul(
            product.quantize(x)[0],
            product.weight,
            product.scale,
            bias=product.bias,
            output_dtype=x.dtype,
        )
        return result.view(*x.shape[:-1], -1)

    def _one_of(self, layer: torch.nn.Module, name: str) -> torch.Tensor:
        """The value shared by all parts of a fused layer, [1]."""
        values = plain_tensor(layer, name)
        if self.settings.is_loaded and bool((values != values[0]).any()):
            raise CheckpointError(
                f"{self.prefix} is one product with one input, and {name} differs between its "
                f"parts: {values.tolist()}. Export the model with one input scale for these parts."
            )
        return values[:1].contiguous()


class W8A8FusedMoEMethod(QuantizedFusedMoEMethodBase):
    """int8 weights, inputs quantized with each expert's scale and offset from the checkpoint."""

    def _experts(self, layer: NPURoutedExperts, **place: Any) -> Experts:
        # Ranks that share an expert are summed; the bias of its second product must be added once.
        adds_bias = layer.moe_config.moe_parallel_config.tp_rank == 0
        return StaticExperts(
            gate_up=self._projection(layer, "w13", adds_bias=True),
            down=self._projection(layer, "w2", adds_bias=adds_bias),
            **place,
        )

    def _projection(self, layer: NPURoutedExperts, group: str, adds_bias: bool) -> StaticProjection:
        deq_scale = loaded(layer, f"{group}_deq_scale")
        return StaticProjection(
            weight=self.arranged(layer.get_parameter(f"{group}_weight")),
            input_scale=loaded(layer, f"{group}_input_scale"),
            input_offset=loaded(layer, f"{group}_input_offset").float(),
            deq_scale=deq_scale_as_float(deq_scale.cpu()).to(deq_scale.device),
            quant_bias=loaded(layer, f"{group}_quant_bias") if adds_bias else None,
        )


@dataclass(frozen=True, kw_only=True)
class StaticProjection:
    """One projection of all experts, with each expert's input scale from the checkpoint.

    Scales the product's sums here: for a bf16 result, the grouped product itself accepts only a
    bf16 scale, which has too few bits for this one.

    weight:       [num_local, in, out] int8
    input_scale:  [num_local, 1] fp32
    input_offset: [num_local, 1] fp32
    deq_scale:    [num_local, out] fp32
    quant_bias:   [num_local, out] int32, or None if another rank of the sum adds it
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
class StaticExperts(ExpertsOfFloats):
    """Gated experts with int8 weights and their own input scales, which quantize the rows."""

    gate_up: StaticProjection
    down: StaticProjection

    def _products(
        self, rows: torch.Tensor, tokens_per_expert: torch.Tensor
    ) -> tuple[Product, Product]:
        ends = tokens_per_expert.cumsum(0)
        number = torch.arange(len(rows), device=rows.device)
        # Number of experts with all rows before this row; padding rows use the last expert's
        # scales.
        expert_of_row = (number.unsqueeze(1) >= ends).sum(1).clamp_max(self.num_local - 1)
        return (
            lambda rows: self.gate_up(rows, expert_of_row, tokens_per_expert),
            lambda rows: self.down(rows, expert_of_row, tokens_per_expert),
        )


@SCHEMES.register
class W8A8(Int8Scheme):
    name = "W8A8"
    parameters = STATIC_TENSORS
    folds_bias = True
    linear_method = W8A8LinearMethod
    experts_method = W8A8FusedMoEMethod
    needs_input_range = True

    def stored(self, layout: Layout) -> tuple[TensorSpec, ...]:
        """The stored tensors; exporters of version 0 recipes write the weight's own scales, too."""
        return *STATIC_TENSORS, *(replace(spec, is_optional=True) for spec in PER_CHANNEL)

    def converted(self, part: str, tensor: torch.Tensor, layout: Layout) -> torch.Tensor | None:
        return None if part in ("weight_scale", "weight_offset") else tensor  # are in deq_scale

    def floats(self, tensor: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """The dequantized weight; its scale is deq_scale / input_scale."""
        weight = tensor("weight")
        scale = deq_scale_as_float(tensor("deq_scale").cpu()) / tensor("input_scale").cpu()
        return weight.float() * scale.unsqueeze(1).to(weight.device)

    def seen(self, inputs: torch.Tensor, tensor: Callable[[str], torch.Tensor]) -> torch.Tensor:
        scale, offset = tensor("input_scale"), tensor("input_offset")
        return ((inputs / scale + offset).round_().clamp_(-128, 127) - offset) * scale

    def rounded(self, layer: FloatLayer) -> dict[str, torch.Tensor]:
        """Rounds a layer; maps the input's range to -128 to 127 and folds in the bias."""
        assert layer.inputs is not None, "needs_input_range"
        integers, weight_scale = rounded_per_channel(layer.weight)
        scale, integer_of_zero = scale_and_offset(layer.inputs)
        input_scale, input_offset = torch.tensor([scale]), torch.tensor([integer_of_zero])
        deq_scale = input_scale * weight_scale.flatten()
        quant_bias = -input_offset.double() * integers.double().sum(1)
        if layer.bias is not None:
            quant_bias += layer.bias.double() / deq_scale.double()
        limits = torch.iinfo(torch.int32)
        return {
            "weight": integers,
            "quant_bias": quant_bias.round().clamp(limits.min, limits.max).to(torch.int32),
            "input_scale": input_scale,
            "input_offset": input_offset,
            "deq_scale": bits_from_float(deq_scale) if layer.dtype == torch.float16 else deq_scale,
        }
