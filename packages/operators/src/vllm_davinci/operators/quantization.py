"""Rows as integers, and integers by eights."""

from __future__ import annotations

import torch
from torch import Tensor


def static_quant(x: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """Rows as integers with one scale and offset: x is about (integers - offset) * scale."""
    return to_int8(x.float() / scale + offset)


def to_int8(x: Tensor) -> Tensor:
    """The nearest integers, halves to even, within int8's range. NaN becomes 0."""
    return torch.nan_to_num(torch.round(x)).clamp(-128, 127).to(torch.int8)


def dynamic_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as integers with one scale each: x is about integers * scale."""
    wide = x.float()
    scales = wide.abs().amax(-1) / 127
    steps = torch.where(scales == 0, 1, scales).unsqueeze(-1)
    return to_int8(wide / steps), scales


def dynamic_quant_in_launch(x: Tensor) -> tuple[Tensor, Tensor]:
    """Like dynamic_quant, as fused operators round: values are multiplied by 127 / max|x|."""
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True)
    # A tensor divided by a tensor: torch takes a number divided by one for its reciprocal times it.
    return to_int8(wide * (torch.full_like(largest, 127) / largest)), (largest / 127).squeeze(-1)


def pack_int4(x: Tensor) -> Tensor:
    """4-bit integers [..., n] by eights in int32 [..., n / 8], the first in the lowest bits."""
    groups = (x.long() & 15).unflatten(-1, (-1, 8)) << torch.arange(0, 32, 4)
    total = groups.sum(-1)
    return torch.where(total >= 2**31, total - 2**32, total).int()
