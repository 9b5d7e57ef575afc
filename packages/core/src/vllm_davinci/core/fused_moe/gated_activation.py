"""The activation of gated experts, between their two products."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch_npu
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts


@dataclass(frozen=True)
class Situ:
    """SiTU: beta * tanh(gate / beta) * sigmoid(gate) * bounded up. Source: Kimi-K3.

    linear_beta: bounds up by linear_beta * tanh(up / linear_beta); None leaves it unbounded
    """

    beta: float
    linear_beta: float | None

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """gate, up: fp32 of the same shape. Returns a new tensor like them."""
        result = (gate / self.beta).tanh().mul_(self.beta).mul_(gate.sigmoid())
        if self.linear_beta is not None:
            up = (up / self.linear_beta).tanh().mul_(self.linear_beta)
        return result.mul_(up)


@dataclass(frozen=True)
class GatedActivation:
    """silu(gate) * up; with a limit, gate * sigmoid(alpha * gate) * (up + beta); or SiTU.

    limit: caps gate from above and clips up on both sides
    Source: DeepSeek-V4's swiglu_limit, MiniMax-M3's SwiGLU-OAI.
    """

    limit: float | None = None
    alpha: float = 1.0
    beta: float = 0.0
    situ: Situ | None = None

    @classmethod
    def of_layer(cls, layer: "RoutedExperts") -> "GatedActivation":
        config = layer.moe_config
        if layer.activation is MoEActivation.SITU:
            beta = config.activation_situ_beta
            return cls(situ=Situ(beta or 1.0, config.activation_situ_linear_beta))
        alpha = 1.0 if layer.swiglu_alpha is None else layer.swiglu_alpha
        return cls(layer.swiglu_limit, alpha, layer.swiglu_beta or 0.0)

    @property
    def is_plain(self) -> bool:
        """True for silu(gate) * up, the only activation of fused operators."""
        return self.limit is None and self.situ is None

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up: [num_rows, 2 * n], gate before up. Returns [num_rows, n]."""
        if self.situ is not None:
            return self.situ(*gate_up.float().chunk(2, dim=-1)).to(gate_up.dtype)
        if self.limit is None:
            return torch_npu.npu_swiglu(gate_up)
        return torch_npu.npu_clipped_swiglu(
            gate_up, alpha=self.alpha, limit=self.limit, bias=self.beta, interleaved=False
        )
