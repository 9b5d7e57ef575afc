"""Quantizes rows, and packs 4-bit integers."""

import torch
from torch import Tensor


def static_quant(x: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """Quantizes rows with one scale and offset: x is about (integers - offset) * scale."""
    return to_int8(x.float() / scale + offset)


def to_int8(x: Tensor) -> Tensor:
    """Rounds to the nearest integers in int8's range, halves to even. NaN becomes 0."""
    return torch.nan_to_num(torch.round(x)).clamp(-128, 127).to(torch.int8)


def dynamic_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes rows with one scale each: x is about integers * scale."""
    wide = x.float()
    scales = wide.abs().amax(-1) / 127
    steps = torch.where(scales == 0, 1, scales).unsqueeze(-1)
    return to_int8(wide / steps), scales


def dynamic_quant_in_launch(x: Tensor) -> tuple[Tensor, Tensor]:
    """Like dynamic_quant, with the rounding of fused operators: x is multiplied by 127 / max|x|."""
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True)
    # Divides tensors: torch computes number / tensor as reciprocal * number.
    return to_int8(wide * (torch.full_like(largest, 127) / largest)), (largest / 127).squeeze(-1)


def pack_int4(x: Tensor) -> Tensor:
    """Packs 4-bit integers [..., n] into int32 [..., n / 8], the first in the lowest bits."""
    groups = (x.long() & 15).unflatten(-1, (-1, 8)) << torch.arange(0, 32, 4)
    total = groups.sum(-1)
    return torch.where(total >= 2**31, total - 2**32, total).int()
