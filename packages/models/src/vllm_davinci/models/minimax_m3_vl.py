"""MiniMax-M3 with images: vLLM's tower, whose heads are rotated without its Triton kernels."""

from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.models.minimax_m3.common import vision_tower
from vllm.models.minimax_m3.nvidia.model import MiniMaxM3SparseForConditionalGeneration


class AxisRotations(nn.Module):
    """Replaces vLLM's setup of the tower's rotations by time, row and column of each patch."""

    def forward(
        self,
        inv_freq_t: torch.Tensor,
        inv_freq_h: torch.Tensor,
        inv_freq_w: torch.Tensor,
        grid_thw: list[list[int]],
        spatial_merge_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of all patches, [num_patches, pairs of a head] each, fp32.

        grid_thw: frames, rows and columns of each image, in patches
        """
        places = np.concatenate([_places(grid, spatial_merge_size) for grid in grid_thw])
        on_host = torch.from_numpy(places.astype(np.float32))
        if inv_freq_t.device.type != "cpu":
            on_host = on_host.pin_memory()
        on_device = on_host.to(inv_freq_t.device, non_blocking=True)
        per_axis = on_device.unsqueeze(2).unbind(1)
        frequencies = (inv_freq_t, inv_freq_h, inv_freq_w)
        angles = torch.cat(
            [place * each.float() for place, each in zip(per_axis, frequencies, strict=True)], -1
        )
        return angles.cos(), angles.sin()


def _places(grid: list[int], merge: int) -> np.ndarray:
    """Frame, row and column of each patch, in the tower's order: [num_patches, 3].

    The patches of a square that is merged to one token follow each other.
    """
    frames, rows, columns = grid
    axes = np.indices((frames, rows // merge, merge, columns // merge, merge))
    axes = axes.transpose(0, 1, 2, 4, 3, 5)
    return np.stack(
        [axes[0], axes[1] * merge + axes[2], axes[3] * merge + axes[4]], axis=-1
    ).reshape(-1, 3)


class NPUMiniMaxVLAttention(vision_tower.MiniMaxVLAttention):
    """The tower's attention, with rotations of `AxisRotations`."""

    def forward(
        self,
        x: torch.Tensor,
        cu_seqlens: torch.Tensor,
        rotary_cos: torch.Tensor,
        rotary_sin: torch.Tensor,
        max_seqlen: torch.Tensor,
        sequence_lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of an image's patches. x: [num_patches, 1, hidden_size]. Returns a tensor like
        it.
        """
        heads = self.qkv_proj(x)[0].view(1, len(x), 3, self.num_heads_per_partition, self.head_dim)
        query, key, value = heads.unbind(2)
        cos, sin = rotary_cos.unsqueeze(1), rotary_sin.unsqueeze(1)
        context = self.attn(
            query=_rotated(query, cos, sin),
            key=_rotated(key, cos, sin),
            value=value,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            sequence_lengths=sequence_lengths,
        )
        result: torch.Tensor = self.out_proj(context.reshape(len(x), 1, -1))[0]
        return result


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the first entries of each head in fp32, in pairs from both halves of these entries.

    heads: [1, num_patches, num_heads, head_size]; cos, sin: [num_patches, 1, pairs]
    """
    pairs = cos.shape[-1]
    first, second, rest = heads.split([pairs, pairs, heads.shape[-1] - 2 * pairs], dim=-1)
    one, two = first.float(), second.float()
    turned = torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1)
    return torch.cat([turned.to(heads.dtype), rest], dim=-1)


class NPUMiniMaxM3ForConditionalGeneration(MiniMaxM3SparseForConditionalGeneration):
    """vLLM's model with the language model of `minimax_m3`."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        tower: Any = getattr(self.vision_tower, "vision_model", None)
        if tower is None:  # --language-model-only
            return
        tower.mrope_setup = AxisRotations()
        for layer in tower.encoder.layers:
            layer.self_attn.__class__ = NPUMiniMaxVLAttention
