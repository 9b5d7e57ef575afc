"""GLM-OCR and PaddleOCR-VL. Their encoders make the starts of images on the host and copy them to
the device; this module keeps the host's copy for attention, which needs it.
"""

from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models.glm_ocr import (
    GlmOcrForConditionalGeneration,
    GlmOcrVisionTransformer,
)
from vllm.model_executor.models.paddleocr_vl import PaddleOCRVLForConditionalGeneration
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_davinci.core.attention.encoder import remember_starts


class _GlmOcrEncoder(GlmOcrVisionTransformer):
    """vLLM's encoder, which asks for the longest sequence before its first block."""

    _starts: np.ndarray

    def forward(
        self,
        x: torch.Tensor,
        grid_thw: torch.Tensor | list[list[int]],
        encoder_metadata: dict[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """x: pixels of all patches. grid_thw: frames, rows and columns [images, 3], on the host"""
        frames, rows, columns = np.asarray(grid_thw, dtype=np.int32).T
        self._starts = np.cumsum([0, *np.repeat(rows * columns, frames)])
        encoded: torch.Tensor = super().forward(x, grid_thw, encoder_metadata)
        return encoded

    def compute_attn_mask_seqlen(self, cu_seqlens: torch.Tensor) -> torch.Tensor | None:
        remember_starts(cu_seqlens, self._starts)
        return super().compute_attn_mask_seqlen(cu_seqlens)


class NPUGlmOcrForConditionalGeneration(GlmOcrForConditionalGeneration):
    """vLLM's model, whose encoder does not wait."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        # Without images vLLM leaves a layer in place of the encoder.
        if isinstance(self.visual, GlmOcrVisionTransformer):
            self.visual.__class__ = _GlmOcrEncoder


class NPUPaddleOCRVLForConditionalGeneration(PaddleOCRVLForConditionalGeneration):
    """vLLM's model, whose encoder does not wait."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.visual.register_forward_pre_hook(_copy_starts, with_kwargs=True)


def _copy_starts(
    module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copies the starts before vLLM's encoder does, and keeps them on the host."""
    starts, device = options["cu_seqlens"], options["pixel_values"].device
    copied = async_tensor_h2d(starts, device)
    remember_starts(copied, starts.numpy())
    return arguments, {**options, "cu_seqlens": copied}
