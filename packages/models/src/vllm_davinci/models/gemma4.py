"""Gemma4 with images: the pooled features of each image are counted on the host."""

from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.gemma4_mm import Gemma4ForConditionalGeneration
from vllm.utils.torch_utils import async_tensor_h2d


class NPUGemma4ForConditionalGeneration(Gemma4ForConditionalGeneration):
    """vLLM's model, which drops a pool's empty features by a mask that the host knows."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        # Without images vLLM leaves a layer in place of the encoder.
        pooler: Any = getattr(self.vision_tower, "pooler", None)
        if pooler is not None:
            pooler.register_forward_hook(_mask_from_host, with_kwargs=True)


def _mask_from_host(
    module: torch.nn.Module, arguments: Any, options: dict[str, Any], output: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pooler's output with its mask [images, pools] computed from positions on the host.

    Positions, which the encoder runner has copied to the device, are read without a wait.
    """
    pooled, mask = output
    positions = options["pixel_position_ids"]  # column and row [images, patches, 2], -1: padding
    if pooled.shape[1] == positions.shape[1]:
        return pooled, mask  # nothing is pooled
    side = int((positions.shape[1] // pooled.shape[1]) ** 0.5)
    column, row = np.moveaxis(positions.cpu().numpy().clip(min=0), -1, 0)
    widths = (column.max(axis=1, keepdims=True) + 1) // side
    is_filled = np.zeros(mask.shape, dtype=bool)
    np.put_along_axis(is_filled, column // side + widths * (row // side), True, axis=1)
    return pooled, async_tensor_h2d(is_filled, mask.device)
