"""The int8 kernel that vLLM's own formats, such as compressed-tensors, choose on the NPU."""

from __future__ import annotations

import torch
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    Int8ScaledMMLinearKernel,
    Int8ScaledMMLinearLayerConfig,
)

from vllm_davinci.core.quantization.dynamic_product import dynamic_product


class NPUInt8ScaledMMLinearKernel(Int8ScaledMMLinearKernel):
    """Weights with a scale per channel or per part, every token quantized with its own scale."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, c: Int8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        if c.is_static_input_scheme:
            return False, (
                "activations with a scale from the checkpoint are not available for this format on "
                "the NPU. Use a checkpoint with dynamic activations, or vllm-davinci quantize "
                "--type W8A8."
            )
        if not c.input_symmetric:
            return False, "asymmetric activations are not available on the NPU."
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        name, scale_name, *_ = self.layer_param_names
        weight = layer.get_parameter(name).detach().as_subclass(torch.Tensor)
        scale = layer.get_parameter(scale_name).detach().as_subclass(torch.Tensor)
        if not self.config.is_channelwise:  # one scale per part of a fused layer
            widths = torch.tensor(layer.logical_widths)
            scale = scale.cpu().flatten().repeat_interleave(widths).to(weight.device)
        self._weight = weight.t()
        self._weight_scale = scale.flatten().to(torch.float32)

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x: [..., in_features]. Returns [..., out_features] of the same dtype."""
        return dynamic_product(x, self._weight, self._weight_scale, bias)
