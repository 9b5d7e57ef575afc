"""Round-to-nearest: converts float weights and observed ranges to integers and scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class InputRange:
    """The smallest and the largest value of a layer's input."""

    low: float
    high: float

    def joined(self, other: InputRange) -> InputRange:
        return InputRange(min(self.low, other.low), max(self.high, other.high))


@dataclass(frozen=True)
class FloatLayer:
    """A linear layer, or one expert's projection, to be rounded.

    weight: [out, in]
    dtype:  of the model
    bias:   [out]
    inputs: the range of the layer's input, for schemes with `needs_input_range`
    """

    weight: torch.Tensor
    dtype: torch.dtype
    bias: torch.Tensor | None = None
    inputs: InputRange | None = None


def scale_and_offset(seen: InputRange) -> tuple[float, float]:
    """The step and the zero point that map a range to -128 to 127."""
    low, high = min(seen.low, 0.0), max(seen.high, 0.0)  # zero stays representable
    scale = (high - low) / 255 or 1.0
    return scale, float(max(-128, min(127, round(-128 - low / scale))))


def rounded_per_channel(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds to int8 [out, in]; also returns the scale of each row, fp32 [out, 1]."""
    wide = weight.to(torch.float32)
    scale = wide.abs().amax(1, keepdim=True) / 127
    # A channel of zeros has no range; any scale serves it.
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return (wide / scale).round().clamp(-128, 127).to(torch.int8), scale


def stored_per_channel(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The stored tensors of symmetric int8 weights with a scale per channel."""
    integers, scale = rounded_per_channel(weight)
    return {"weight": integers, "weight_scale": scale, "weight_offset": torch.zeros_like(scale)}
