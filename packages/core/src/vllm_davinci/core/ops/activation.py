"""Gated activations on torch_npu's fused operators."""

import torch
import torch_npu
from vllm.model_executor.layers.activation import SiluAndMul


class NPUSiluAndMul(SiluAndMul):
    """silu(x[..., :d]) * x[..., d:] in one launch."""

    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., 2 * d]. Returns [..., d]."""
        return torch_npu.npu_swiglu(x)
