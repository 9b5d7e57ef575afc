"""What a linear layer on int8 products is once its weights are loaded."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch_npu

from vllm_davinci.core.quantization.handover import InputScale, QuantizedActivation


class IntegerProduct(NamedTuple):
    """(integers @ weight + bias) * scale, times the rows' scales where they have some.

    weight:      [in_features, out_features] int8, also in the NZ layout
    scale:       [out_features] fp32; with an input_scale in an FP16 model its bits as int64
    bias:        [out_features] int32, or None
    input_scale: how the input is quantized, or None when every row has a scale of its own
    """

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None
    input_scale: InputScale | None

    def quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x: [..., in_features]. Returns int8 rows [num_tokens, in_features] and their scales.

        One launch, or none for what a norm has quantized in its own.
        """
        if self.input_scale is not None:
            return self.input_scale.quantize(x), None
        if isinstance(x, QuantizedActivation):
            return x.integers, x.scales
        integers, scales = torch_npu.npu_dynamic_quant(x.reshape(-1, x.shape[-1]))
        return integers, scales

    def quantizes_as(self, other: IntegerProduct) -> bool:
        """Whether rows that were quantized for one can be multiplied by the other."""
        if self.input_scale is None or other.input_scale is None:
            return self.input_scale is other.input_scale
        return self.input_scale.values == other.input_scale.values
