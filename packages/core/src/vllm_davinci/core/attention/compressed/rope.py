"""Rotary embedding of the last entries of a row, in adjacent pairs, and its inverse."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from vllm_davinci import operators
from vllm_davinci.core.components.fused_ops import fused_op


class CosSin(NamedTuple):
    """Cosines and sines per position: [n, 1, size] each, fp32, for both entries of each pair.

    The sine for the first entry is negative.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def backwards(self) -> "CosSin":
        return CosSin(self.cos, -self.sin)


class RopeTable(nn.Module):
    """Cosines and sines of all positions, fp32: rounded angles of far tokens are off by whole
    turns."""

    table: torch.Tensor  # [2, num_positions, size]: cosines, sines

    def __init__(self, inverse_frequencies: torch.Tensor, num_positions: int) -> None:
        super().__init__()
        with torch.device("cpu"):  # where sines of large arguments are exact
            angles = torch.arange(num_positions).float()[:, None] * inverse_frequencies.cpu()
            sines = torch.stack([-angles.sin(), angles.sin()], dim=-1).flatten(-2)
            table = torch.stack([angles.cos().repeat_interleave(2, dim=-1), sines])
        self.register_buffer("table", table.to(torch.get_default_device()), persistent=False)

    def at(self, positions: torch.Tensor) -> CosSin:
        """positions: [n], int64"""
        return CosSin(*self.table.index_select(1, positions).unsqueeze(2).unbind())

    @staticmethod
    def rotate(x: torch.Tensor, by: CosSin) -> torch.Tensor:
        """x: [n, heads, size or more]; rotates its last entries in place, and returns it."""
        rotate = fused_op(operators.rotate_pairs) or operators.rotate_pairs
        rotate(x, by.cos, by.sin)
        return x


def inverse_frequencies(base: float, size: int, scaling: Mapping[str, Any] | None) -> torch.Tensor:
    """Radians per position of each pair of `size` entries: [size / 2], fp32, on the CPU.

    scaling: YaRN's keys of a configuration; None without YaRN. Cosines and sines are not scaled.
    Source: Peng et al. 2023, YaRN, 3.2; bit-identical with transformers.
    """
    with torch.device("cpu"):
        powers = base ** (torch.arange(0, size, 2).float() / size)
        plain = 1.0 / powers
        if scaling is None or scaling.get("rope_type", scaling.get("type")) != "yarn":
            return plain

        def place_of(num_rotations: float) -> float:
            length = scaling["original_max_position_embeddings"]
            turns = math.log(length / (num_rotations * 2 * math.pi))
            return size * turns / (2 * math.log(base))

        low = max(math.floor(place_of(scaling.get("beta_fast") or 32)), 0)
        high = min(math.ceil(place_of(scaling.get("beta_slow") or 1)), size - 1)
        ramp = (torch.arange(size // 2).float() - low) / ((high - low) or 0.001)
        kept = 1 - ramp.clamp(0, 1)
        return (1.0 / (scaling["factor"] * powers)) * (1 - kept) + plain * kept
