"""Root-mean-square norms, and the gated activation."""

import torch
from torch import Tensor

from vllm_davinci.operators.quantization import dynamic_quant, static_quant


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Root-mean-square normalization over the last dimension.

    x:      [..., hidden_size]
    weight: [hidden_size]
    Source: Zhang and Sennrich 2019, eq. 4.
    """
    return (x.float() * reciprocal_root(x, 1, epsilon) * weight.float()).to(x.dtype)


def reciprocal_root(x: Tensor, num_dims: int, epsilon: float) -> Tensor:
    """1 / sqrt(mean of squares + epsilon) over the last num_dims dimensions, which keep size 1;
    fp32.
    """
    dims = tuple(range(-num_dims, 0))
    return torch.rsqrt(x.float().square().mean(dims, keepdim=True) + epsilon)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Norm of x + residual, and that sum, both [..., hidden_size]."""
    total = (x.float() + residual.float()).to(x.dtype)
    return rms_norm(total, weight, epsilon), total


def add_rms_norm_dynamic_quant(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of x + residual, quantized with a scale per row, and that sum.

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
    """The norm of x + residual, plus bias, quantized with a given scale, and that sum.

    bias:   [hidden_size] or None
    scale:  [1] fp32, offset: [1] int32: integer = round(value / scale + offset)
    Returns int8 [..., hidden_size] and the sum in x's dtype.
    """
    normalized, total = add_rms_norm(x, residual, weight, epsilon)
    if bias is not None:
        normalized = normalized + bias
    return static_quant(normalized, scale, offset), total


def swiglu(x: Tensor) -> Tensor:
    """silu of the first half of the last dimension times the second half. Source: Shazeer 2020."""
    gate, up = x.float().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def clipped_swiglu(x: Tensor, alpha: float, limit: float) -> Tensor:
    """gate * sigmoid(alpha * gate) * (value + 1), with interleaved gate and value, both clipped.

    Source: the model card of gpt-oss.
    """
    gate, value = x[..., ::2].float().clamp_max(limit), x[..., 1::2].float().clamp(-limit, limit)
    return (gate * torch.sigmoid(alpha * gate) * (value + 1)).to(x.dtype)
