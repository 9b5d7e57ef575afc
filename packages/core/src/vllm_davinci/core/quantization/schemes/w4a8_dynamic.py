"""W4A8_DYNAMIC: integers of 4 bits in the files, computed as those of W8A8_DYNAMIC."""

from __future__ import annotations

import torch

from vllm_davinci.core.quantization.scheme import SCHEMES, Layout
from vllm_davinci.core.quantization.schemes.w8a8_dynamic import W8A8Dynamic
from vllm_davinci.core.quantization.tensors import PER_CHANNEL, Extent, TensorSpec
from vllm_davinci.core.quantization.weight_only import unpacked_rows


@SCHEMES.register
class W4A8Dynamic(W8A8Dynamic):
    name = "W4A8_DYNAMIC"
    computed_as = W8A8Dynamic.name
    is_written = False

    def stored(self, layout: Layout) -> tuple[TensorSpec, ...]:
        return (
            TensorSpec("weight", Extent.PACKED_ROWS, (torch.int8,)),
            *PER_CHANNEL,
            TensorSpec("scale_bias", Extent.PER_PART, (torch.float32,)),
        )

    def converted(self, part: str, tensor: torch.Tensor, layout: Layout) -> torch.Tensor | None:
        if part == "scale_bias":  # a correction for products of halves of int8
            return None
        return unpacked_rows(tensor) if part == "weight" else tensor
