"""Linear layers on int8 products.

Static:  xq = clamp(round(x / input_scale + input_offset), -128, 127)
         y  = (xq * weight^T + quant_bias) * deq_scale
Dynamic: s  = max|x| / 127 per token, xq = round(x / s)
         y  = (xq * weight^T) * weight_scale * s + bias
Sums are int32, scaling is fp32, the result is rounded once to the input's dtype.
"""

from __future__ import annotations

import torch
import torch_npu
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    RowParallelLinear,
    register_weight_loader_v2_supported_method,
)

from vllm_davinci.core.errors import CheckpointError
from vllm_davinci.core.layers.quantized_activation import (
    InputScale,
    Output,
    OutputKind,
    QuantizedActivation,
    Readers,
    TracedActivation,
    quantize,
)
from vllm_davinci.core.quantization.description import QuantType
from vllm_davinci.core.quantization.linear_method import QuantizedLinearMethodBase, plain_tensor
from vllm_davinci.core.quantization.quant_matmul import (
    QuantMatmul,
    arrange_weight,
    per_token_quant_matmul,
)


@register_weight_loader_v2_supported_method
class W8A8LinearMethod(QuantizedLinearMethodBase):
    """int8 weight, input quantized with the scale and offset of the checkpoint."""

    kind = QuantType.W8A8

    def __init__(self, prefix: str, is_loaded: bool, use_nz: bool) -> None:
        super().__init__(prefix, is_loaded)
        self._use_nz = use_nz

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        super().process_weights_after_loading(layer)
        # Ranks of a row-parallel layer are summed; the bias must be in the sum once.
        adds_bias = not isinstance(layer, RowParallelLinear) or layer.tp_rank == 0
        self._product = self.quant_matmul = QuantMatmul(
            weight=arrange_weight(layer.get_parameter("weight"), self._use_nz),
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
        """The value that all parts of a fused layer have, [1]."""
        values = plain_tensor(layer, name)
        if self._is_loaded and bool((values != values[0]).any()):
            raise CheckpointError(
                f"{self.prefix} is one product of one input, and {name} differs between its parts: "
                f"{values.tolist()}. Export the model with one input scale for these parts."
            )
        return values[:1].contiguous()


@register_weight_loader_v2_supported_method
class W8A8DynamicLinearMethod(QuantizedLinearMethodBase):
    """int8 weight, every token quantized with its own scale.

    `output` is set once, after loading (`resolve_outputs`). SUMS: scaling is left to the gated
    activation that follows, which does it in its own launch.
    """

    kind = QuantType.W8A8_DYNAMIC

    def __init__(self, prefix: str, is_loaded: bool, use_nz: bool) -> None:
        super().__init__(prefix, is_loaded)
        self._use_nz = use_nz
        self._may_return_sums = False
        self.output: Output = OutputKind.FLOAT

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        super().process_weights_after_loading(layer)
        self._weight = arrange_weight(layer.get_parameter("weight"), self._use_nz)
        self._weight_scale = plain_tensor(layer, "weight_scale").flatten().to(torch.float32)
        has_bias = getattr(layer, "bias", None) is not None  # which is of floats
        self.quant_matmul = (
            None if has_bias else QuantMatmul(self._weight, self._weight_scale, None, None)
        )
        # A gated activation reads a gate and what it multiplies, as one product.
        self._may_return_sums = not has_bias and isinstance(layer, MergedColumnParallelLinear)

    def can_return(self, kind: OutputKind | InputScale) -> bool:
        """Whether `apply` can have that output; of a layer whose weights are loaded."""
        return kind is OutputKind.SUMS and self._may_return_sums

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x: [..., in_features]. Returns [..., out_features] of the same dtype.

        Returns a QuantizedActivation where `output` says so.
        """
        if self.output is OutputKind.SUMS and bias is None and x.dim() == 2:
            integers, scales = quantize(x)
            sums = torch_npu.npu_quant_matmul(
                integers, self._weight, self._weight_scale, output_dtype=torch.int32
            )
            return QuantizedActivation(sums, scales, x.dtype, self._weight_scale)
        result = per_token_quant_matmul(x, self._weight, self._weight_scale, bias)
        return TracedActivation(result, self.output) if isinstance(self.output, Readers) else result
