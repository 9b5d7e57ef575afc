"""W8A8_MIX: the tensors of W8A8 and of W8A8_DYNAMIC.

Prefills use scales per token. A separate decode engine uses the checkpoint's scales, which save a
launch per product. An engine that does both, and routed experts, use scales per token.
"""

import torch

from vllm_davinci.core.quantization.scheme import SCHEMES, Layout
from vllm_davinci.core.quantization.schemes.w8a8 import STATIC_TENSORS, W8A8
from vllm_davinci.core.quantization.schemes.w8a8_dynamic import W8A8Dynamic
from vllm_davinci.core.quantization.tensors import PER_CHANNEL, TensorSpec


@SCHEMES.register
class W8A8Mix(W8A8Dynamic):
    name = "W8A8_MIX"
    computed_as = W8A8Dynamic.name
    in_decodes = W8A8.name
    is_written = False

    def stored(self, layout: Layout) -> tuple[TensorSpec, ...]:
        return *STATIC_TENSORS, *PER_CHANNEL

    def converted(self, part: str, tensor: torch.Tensor, layout: Layout) -> torch.Tensor | None:
        is_static = part in {spec.name for spec in STATIC_TENSORS[1:]}
        return None if is_static else tensor
