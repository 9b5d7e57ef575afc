"""Root-mean-square normalization on torch_npu's fused operators."""

import torch
import torch_npu
from vllm.model_executor.layers.layernorm import RMSNorm


class NPURMSNorm(RMSNorm):
    """One launch, with or without the residual addition."""

    def forward_oot(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Normalizes x, or x + residual, over the last dimension.

        x:        [..., hidden_size]
        residual: shape and dtype of x, or None
        Returns the normalized tensor, or that and the sum. Accumulates in fp32.
        """
        if self.variance_size_override is not None or not self.has_weight:
            return self.forward_native(x, residual)
        if residual is None:
            return torch_npu.npu_rms_norm(x, self.weight, self.variance_epsilon)[0]
        normalized, _, total = torch_npu.npu_add_rms_norm(
            x, residual, self.weight, self.variance_epsilon
        )
        return normalized, total
