"""Root-mean-square norms."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_davinci.kernels.reference.quantization import dynamic_quant, static_quant


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Root-mean-square normalization over the last dimension.

    x:      [..., hidden_size]
    weight: [hidden_size]
    Source: Zhang and Sennrich 2019, eq. 4.
    """
    return _normalized(x, weight, epsilon).to(x.dtype)


def _normalized(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * weight.float()


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Norm of x + residual, and that sum, both [..., hidden_size]."""
    total = (x.float() + residual.float()).to(x.dtype)
    return rms_norm(total, weight, epsilon), total


def add_rms_norm_dynamic_quant(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of x + residual with a scale per row, and that sum.

    Returns int8 [..., hidden_size], fp32 scales [...] and the sum in x's dtype.
    """
    normalized, total = add_rms_norm(x, residual, weight, epsilon)
    integers, scales = dynamic_quant(normalized)
    return integers, scales, total


def add_rms_norm_quant(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor,
    offset: Tensor,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, plus bias, with a given scale, and that sum.

    bias:   [hidden_size] or None
    scale:  [1] fp32, offset: [1] int32: integer = round(value / scale + offset)
    Returns int8 [..., hidden_size] and the sum in x's dtype.
    """
    normalized, total = add_rms_norm(x, residual, weight, epsilon)
    if bias is not None:
        normalized = normalized + bias
    return static_quant(normalized, scale, offset), total
