"""Gated activations on torch_npu's fused operators."""

import torch
import torch_npu
from vllm.model_executor.layers.activation import SiluAndMul, SiluAndMulWithClamp

from vllm_davinci.core.layers.quantized_activation import QuantizedActivation, TracedActivation


class NPUSiluAndMul(SiluAndMul):
    """silu(x[..., :d]) * x[..., d:] in one launch."""

    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., 2 * d]. Returns [..., d], quantized per token if x holds an int8 product's sums.

        In that case one launch scales, activates and quantizes, without rounding in between.
        """
        if isinstance(x, QuantizedActivation):
            integers, scales = torch_npu.npu_dequant_swiglu_quant(
                x.integers,
                weight_scale=x.weight_scale,
                activation_scale=x.scales,
                activate_left=True,
                quant_mode=1,
            )
            return QuantizedActivation(integers, scales, x.dtype)
        if isinstance(x, TracedActivation):
            return TracedActivation(torch_npu.npu_swiglu(x.floats), x.readers.add_activation())
        return torch_npu.npu_swiglu(x)


class NPUSiluAndMulWithClamp(SiluAndMulWithClamp):
    """Like NPUSiluAndMul, with a capped gate and clipped factors, in one launch."""

    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., 2 * d]. Returns [..., d]: gate * sigmoid(alpha * gate) * (up + beta)."""
        return torch_npu.npu_clipped_swiglu(
            x, alpha=self.alpha, limit=self.swiglu_limit, bias=self.beta, interleaved=False
        )
