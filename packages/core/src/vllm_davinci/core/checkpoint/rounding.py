"""Round-to-nearest: float weights and observed ranges -> the tensors of a quantized layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_davinci.core.quantization.tensors import bits_from_float


@dataclass(frozen=True)
class InputRange:
    """The smallest and the largest value that a layer's input had."""

    low: float
    high: float

    def joined(self, other: InputRange) -> InputRange:
        return InputRange(min(self.low, other.low), max(self.high, other.high))


# Ends of the range that are tried, as shares of the whole one.
_SHARES = torch.linspace(1.0, 0.2, 41)


def least_error_range(counts: torch.Tensor, seen: InputRange) -> InputRange:
    """The part of a range whose 256 levels stand for the values with the least squared error.

    A rare value at the end costs its own error when it is cut off, and all others a wider step
    when it is not.
    counts: histogram of the values over `seen`, in bins of one width
    """
    step = (seen.high - seen.low) / counts.numel()
    centers = seen.low + step * (torch.arange(counts.numel()) + 0.5)
    best, least = seen, float("inf")
    for share in _SHARES.tolist():
        tried = InputRange(min(seen.low * share, 0.0), max(seen.high * share, 0.0))
        scale, offset = scale_and_offset(tried)
        levels = (centers / scale + offset).round().clamp(-128, 127)
        error = float((counts * (centers - (levels - offset) * scale) ** 2).sum())
        if error < least:
            best, least = tried, error
    return best


def scale_and_offset(seen: InputRange) -> tuple[float, float]:
    """The step and the integer of zero that map a range on -128 to 127."""
    low, high = min(seen.low, 0.0), max(seen.high, 0.0)  # zero stays representable
    scale = (high - low) / 255 or 1.0
    return scale, float(max(-128, min(127, round(-128 - low / scale))))


def dynamic_tensors(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of W8A8_DYNAMIC: symmetric, a scale per output channel, fp32 [out, 1].

    weight: [out, in], any float dtype
    """
    integers, scale = _rounded(weight)
    return {
        "weight": integers,
        "weight_scale": scale,
        "weight_offset": torch.zeros_like(scale),
    }


def _rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [out, in] and the scale of each row, fp32 [out, 1]."""
    wide = weight.to(torch.float32)
    scale = wide.abs().amax(1, keepdim=True) / 127
    # A channel of zeros has no range; any scale serves it.
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return (wide / scale).round().clamp(-128, 127).to(torch.int8), scale


def static_tensors(
    weight: torch.Tensor, bias: torch.Tensor | None, seen: InputRange, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The five tensors of W8A8, with the input's range mapped on -128 to 127.

    weight: [out, in]; bias: [out] or None, which goes into `quant_bias`
    dtype:  the model's: with fp16 `deq_scale` is kept as bits
    """
    integers, weight_scale = _rounded(weight)
    scale, integer_of_zero = scale_and_offset(seen)
    input_scale, input_offset = torch.tensor([scale]), torch.tensor([integer_of_zero])
    deq_scale = input_scale * weight_scale.flatten()
    quant_bias = -input_offset.double() * integers.double().sum(1)
    if bias is not None:
        quant_bias += bias.double() / deq_scale.double()
    limits = torch.iinfo(torch.int32)
    return {
        "weight": integers,
        "quant_bias": quant_bias.round().clamp(limits.min, limits.max).to(torch.int32),
        "input_scale": input_scale,
        "input_offset": input_offset,
        "deq_scale": bits_from_float(deq_scale) if dtype == torch.float16 else deq_scale,
    }
