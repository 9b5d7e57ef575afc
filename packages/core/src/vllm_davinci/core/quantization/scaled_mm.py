"""The int8 kernel of vLLM's own formats, such as compressed-tensors, on the NPU.

With o and s the zero point and the scale of the activations:
    xq = clamp(round(x / s) + o, -128, 127)
    y  = (xq * weight^T - o * sum(weight)) * weight_scale * s + bias
"""

import torch
import torch_npu
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    Int8ScaledMMLinearKernel,
    Int8ScaledMMLinearLayerConfig,
)

from vllm_davinci.core.quantization.linear_method import plain_tensor
from vllm_davinci.core.quantization.quant_matmul import per_token_quant_matmul
from vllm_davinci.core.quantization.tensors import bits_from_float


class NPUInt8ScaledMMLinearKernel(Int8ScaledMMLinearKernel):
    """Weights with a scale per channel or per part; all activation types of the format."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, c: Int8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        name, scale_name, input_scale_name, zero_point_name, _ = self.layer_param_names
        weight, scale = plain_tensor(layer, name), plain_tensor(layer, scale_name)
        if not self.config.is_channelwise:  # one scale per part of a fused layer
            widths = torch.tensor(layer.logical_widths)
            scale = scale.cpu().flatten().repeat_interleave(widths).to(weight.device)
        self._weight = weight.t()
        self._weight_scale = scale.flatten().to(torch.float32)
        # Exact, because the sum of a column of the weight is below 2**31.
        self._weight_sums = weight.cpu().sum(1, dtype=torch.int32)
        if self.config.is_static_input_scheme:
            self._prepare_static(layer, input_scale_name, zero_point_name)
        self._weight_sums = self._weight_sums.to(weight.device, torch.float32)

    def _prepare_static(self, layer: torch.nn.Module, scale_name: str, zero_point: str) -> None:
        self._input_scale = plain_tensor(layer, scale_name).to(torch.float32)
        device = self._weight.device
        deq_scale = self._weight_scale.cpu() * self._input_scale.cpu()
        if layer.params_dtype == torch.float16:
            deq_scale = bits_from_float(deq_scale)
        self._deq_scale = deq_scale.to(device)
        self._quant_bias: torch.Tensor | None = None
        self._input_offset = torch.zeros(1, dtype=torch.int32, device=device)
        if not self.config.input_symmetric:
            self._input_offset = plain_tensor(layer, zero_point).to(torch.int32)
            self._quant_bias = (-self._input_offset.cpu() * self._weight_sums).to(device)

    def floats(self) -> torch.Tensor:
        """[out_features, in_features] fp32, the dequantized weights."""
        return self._weight.t().float() * self._weight_scale.unsqueeze(1)

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x: [..., in_features]. Returns [..., out_features] of the same dtype."""
        if self.config.is_static_input_scheme:
            result = self._static_product(x.reshape(-1, x.shape[-1]), bias)
        elif self.config.input_symmetric:
            return per_token_quant_matmul(x, self._weight, self._weight_scale, bias)
        else:
            result = self._asymmetric_product(x.reshape(-1, x.shape[-1]), bias)
        return result.view(*x.shape[:-1], -1)

    def _static_product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Two launches, and one for a bias."""
        integers = torch_npu.npu_quantize(
            x, self._input_scale, self._input_offset, torch.qint8, -1, True
        )
        result: torch.Tensor = torch_npu.npu_quant_matmul(
            integers, self._weight, self._deq_scale, bias=self._quant_bias, output_dtype=x.dtype
        )
        return result if bias is None else result.add_(bias)

    def _asymmetric_product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Subtracts the zero points' part in fp32: tokens' zero points are not integers."""
        integers, scales, offsets = torch_npu.npu_dynamic_quant_asymmetric(x)
        sums = torch_npu.npu_quant_matmul(
            integers, self._weight, self._weight_scale, output_dtype=torch.int32
        )
        values = torch.addcmul(sums.float(), offsets.unsqueeze(1), self._weight_sums, value=-1)
        values = values.mul_(self._weight_scale).mul_(scales.unsqueeze(1))
        return (values if bias is None else values.add_(bias)).to(x.dtype)
