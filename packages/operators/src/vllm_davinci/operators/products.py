"""Matrix products, of floats and of integers."""

import torch
from torch import Tensor


def product(x: Tensor, weight: Tensor) -> Tensor:
    return (x.float() @ weight.float()).to(x.dtype)


def quant_matmul(
    rows: Tensor,
    row_scale: Tensor | None,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    sums = (rows.double() @ weight.double()).to(torch.int32)  # exact below 2**53
    if bias is not None:
        sums = sums + bias
    values = sums.float() * _float_scales(scale)
    if row_scale is not None:
        values = values * row_scale.unsqueeze(-1)
    return values.to(dtype)


def _float_scales(scale: Tensor) -> Tensor:
    """Converts scales to fp32. int64 scales hold fp32 bits, below 2**31, as scales are positive."""
    return scale.to(torch.int32).view(torch.float32) if scale.dtype == torch.int64 else scale
