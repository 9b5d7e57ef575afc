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


def dynamic_tensors(weight: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors of W8A8_DYNAMIC: symmetric, a scale per output channel.

    weight: [out, in], any float dtype
    dtype:  the model's
    """
    wide = weight.to(torch.float32)
    # Rounded to the stored dtype first, so that the integers belong to the stored scale. A channel
    # of zeros has no range; any scale serves it.
    scale = (wide.abs().amax(1, keepdim=True) / 127).to(dtype)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    integers = (wide / scale.to(torch.float32)).round().clamp(-128, 127).to(torch.int8)
    return {
        "weight": integers,
        "weight_scale": scale,
        "weight_offset": torch.zeros_like(scale),
    }


def static_tensors(
    weight: torch.Tensor, bias: torch.Tensor | None, seen: InputRange, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The tensors of W8A8, with the input's range mapped on -128 to 127.

    weight: [out, in]; bias: [out] or None, which goes into `quant_bias`
    """
    tensors = dynamic_tensors(weight, dtype)
    low, high = min(seen.low, 0.0), max(seen.high, 0.0)  # zero stays representable
    width = high - low
    input_scale = torch.tensor([width / 255 if width > 0 else 1.0]).to(dtype)
    offset = torch.tensor(-128 - low / input_scale.item()).round().clamp(-128, 127)
    deq_scale = (input_scale.float() * tensors["weight_scale"].float()).flatten()
    quant_bias = -offset.double() * tensors["weight"].double().sum(1)
    if bias is not None:
        quant_bias += bias.double() / deq_scale.double()
    limits = torch.iinfo(torch.int32)
    return tensors | {
        "input_scale": input_scale,
        "input_offset": offset.to(torch.int8).reshape(1),
        "deq_scale": bits_from_float(deq_scale) if dtype == torch.float16 else deq_scale,
        "quant_bias": quant_bias.round().clamp(limits.min, limits.max).to(torch.int32),
    }
