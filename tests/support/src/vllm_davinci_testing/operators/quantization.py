"""Layouts of quantized tensors."""

from __future__ import annotations

import torch


def pack_int4(x: torch.Tensor) -> torch.Tensor:
    """4-bit integers by eights in int32, the first in the lowest bits."""
    groups = (x.long() & 15).unflatten(-1, (-1, 8)) << torch.arange(0, 32, 4)
    total = groups.sum(-1)
    return torch.where(total >= 2**31, total - 2**32, total).int()
