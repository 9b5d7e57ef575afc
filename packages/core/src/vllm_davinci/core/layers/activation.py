"""Gated activations on torch_npu's fused operators."""

import torch
import torch_npu
from vllm.model_executor.layers.activation import SiluAndMul

from vllm_davinci.core.quantization.handover import IntegerProjection


class NPUSiluAndMul(SiluAndMul):
    """silu(x[..., :d]) * x[..., d:] in one launch."""

    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., 2 * d], or the integers of a quantized projection. Returns [..., d]."""
        if isinstance(x, IntegerProjection):
            return x.swiglu()
        return torch_npu.npu_swiglu(x)
