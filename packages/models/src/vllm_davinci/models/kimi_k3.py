"""Kimi-K3: vLLM's tower for images, and the text model of `kimi_linear`."""

from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from transformers import BatchFeature
from vllm.config import VllmConfig
from vllm.model_executor.layers.fusion.mm_input_norm import build_mm_input_norm
from vllm.model_executor.models.kimi_k25_vit import (
    Learnable2DInterpPosEmbDivided_fixed,
    MoonViT3dPretrainedModel,
    MoonViTEncoderLayer,
    Rope2DPosEmbRepeated,
)
from vllm.models.kimi_k3.amd.model import KimiK3ForConditionalGeneration
from vllm.models.kimi_k3.common.mm_preprocess import (
    KimiK3DummyInputsBuilder,
    KimiK3MultiModalProcessor,
    KimiK3ProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.processing import InputProcessingContext
from vllm.transformers_utils.processors.kimi_k3 import KimiK3Processor
from vllm.transformers_utils.processors.kimi_k25_vision_fused import KimiK25FusedVisionProcessor

from vllm_davinci.models.kimi_linear import PACKED_MODULES


class NPUKimiK3ImageProcessor(KimiK25FusedVisionProcessor):
    """vLLM's image processor, whose patches are cut by numpy: its own code needs numba."""

    def preprocess(
        self,
        medias: list[dict[str, Any]],
        return_tensors: Any = None,
        do_rescale: bool = True,
        do_normalize: bool = True,
    ) -> BatchFeature:
        """Cuts images into patches, row by row. medias: each with "type" and "image"

        Returns pixel_values [num_patches, 3, patch_size, patch_size], fp32 or, if the device
        normalizes them, uint8, and grid_thws [images, 3]: frames (1), rows and columns of patches.
        """
        patches, grids = [], []
        side = self.media_proc_cfg["patch_size"]
        for media in medias:
            image = media["image"].convert("RGB")
            size = self.get_resize_config({**media, "image": image})
            pixels = self.resize_image(image, size["new_width"], size["new_height"])
            pixels = np.pad(pixels, ((0, size["pad_height"]), (0, size["pad_width"]), (0, 0)))
            if do_normalize:
                pixels = self.normalize_lut[pixels, np.arange(3)]
            rows, columns = pixels.shape[0] // side, pixels.shape[1] // side
            cut = pixels.reshape(rows, side, columns, side, 3).transpose(0, 2, 4, 1, 3)
            patches.append(cut.reshape(-1, 3, side, side))
            grids.append([1, rows, columns])
        data = {
            "pixel_values": torch.from_numpy(np.concatenate(patches)),
            "grid_thws": torch.tensor(grids),
        }
        return BatchFeature(data=data, tensor_type=return_tensors)


class NPUKimiK3ProcessingInfo(KimiK3ProcessingInfo):
    """vLLM's class, with the image processor above."""

    image_processor: Any

    def __init__(self, ctx: InputProcessingContext) -> None:
        super().__init__(ctx)
        self.image_processor = NPUKimiK3ImageProcessor(self.image_processor.media_proc_cfg)
        self.hf_processor = KimiK3Processor(self.image_processor, self.get_tokenizer())
        self.media_tokens_calculator = self.image_processor.media_tokens_calculator


class NPUPositions(Learnable2DInterpPosEmbDivided_fixed):
    """Learned positions, resampled at an image's patches by two matrix products."""

    def get_pos_embeds(self, grid_thws: torch.Tensor | list[list[int]]) -> torch.Tensor:
        """Positions of all patches, [num_patches, hidden_size], interpolated linearly in fp32.

        grid_thws: frames (1), rows and columns of each image, on the host
        """
        table = self.weight.float()
        every = []
        for _, rows, columns in np.asarray(grid_thws).tolist():
            by_row = _resampling(rows, self.height, table.device) @ table.flatten(1)
            by_row = by_row.view(rows, self.width, self.dim)
            every.append((_resampling(columns, self.width, table.device) @ by_row).flatten(0, 1))
        return torch.cat(every).to(self.weight.dtype)


def _resampling(places: int, learned: int, device: torch.device) -> torch.Tensor:
    """Weights of learned positions at the middles of equal parts of their line.

    Returns [places, learned], fp32; at most two of a row are not 0, and their sum is 1.
    """
    at = (torch.arange(places, device=device) + 0.5) * (learned / places) - 0.5
    distances = at.clamp(0, learned - 1)[:, None] - torch.arange(learned, device=device)
    return (1 - distances.abs()).clamp(min=0)


class AxisRotations(nn.Module):
    """Replaces vLLM's table of rotations for 512 x 512 patches, of complex numbers.

    Each pair of entries of a head is rotated by a patch's column or row, in turn.
    """

    turns: torch.Tensor

    def __init__(self, replaced: Rope2DPosEmbRepeated) -> None:
        super().__init__()
        places = torch.arange(max(replaced.max_height, replaced.max_width), dtype=torch.float32)
        exponents = torch.arange(0, replaced.dim, 4, dtype=torch.float32) / replaced.dim
        angles = places[:, None] * (1.0 / replaced.theta_base**exponents)
        # [places, pairs of an axis, 2]: cosines and sines
        self.register_buffer("turns", torch.stack([angles.cos(), angles.sin()], -1), False)

    def get_freqs_cis(
        self, grid_thws: torch.Tensor | list[list[int]], device: torch.device
    ) -> torch.Tensor:
        """Cosines and sines of all patches: [num_patches, 1, pairs of a head, 2], fp32.

        grid_thws: frames (1), rows and columns of each image, on the host
        """
        every = []
        for _, rows, columns in np.asarray(grid_thws).tolist():
            shape = (rows, columns, *self.turns.shape[1:])
            of_columns = self.turns[None, :columns].expand(shape)
            of_rows = self.turns[:rows, None].expand(shape)
            turns = torch.stack([of_columns, of_rows], dim=3)
            every.append(turns.reshape(rows * columns, 1, -1, 2))
        return torch.cat(every)


class NPUMoonViTEncoderLayer(MoonViTEncoderLayer):
    """A layer of the tower, with rotations of `AxisRotations`."""

    def attention_qkvpacked(
        self,
        x: torch.Tensor,
        cu_seqlens: torch.Tensor,
        rope_freqs_cis: torch.Tensor,
        max_seqlen: torch.Tensor | None = None,
        sequence_lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of an image's patches. x: [num_patches, hidden_size]. Returns one like it."""
        shape = (3, self.num_attention_heads_per_partition, self.hidden_size_per_attention_head)
        query, key, value = self.wqkv(x)[0].unflatten(-1, shape).unbind(1)
        context = self.attn(
            query=_rotated(query, rope_freqs_cis)[None],
            key=_rotated(key, rope_freqs_cis)[None],
            value=value[None],
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            sequence_lengths=sequence_lengths,
        )
        result: torch.Tensor = self.wo(context.reshape(len(x), -1))[0]
        return result


def _rotated(heads: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Rotates pairs of neighbours in fp32. heads: [num_patches, num_heads, head_size]"""
    one, two = heads.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = turns.unbind(-1)
    turned = torch.stack([one * cos - two * sin, two * cos + one * sin], dim=-1)
    return turned.flatten(-2).to(heads.dtype)


@MULTIMODAL_REGISTRY.register_processor(
    KimiK3MultiModalProcessor, info=NPUKimiK3ProcessingInfo, dummy_inputs=KimiK3DummyInputsBuilder
)
class NPUKimiK3ForConditionalGeneration(KimiK3ForConditionalGeneration):
    """vLLM's model for platforms with their own layers."""

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = PACKED_MODULES

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if isinstance(self.vision_tower, MoonViT3dPretrainedModel):  # not --language-model-only
            # vLLM casts the whole tower, and so rounds the constants that normalize pixels.
            patch_embed = self.vision_tower.patch_embed
            patch_embed.input_norm = build_mm_input_norm(vllm_config.model_config)
            positions = patch_embed.pos_emb
            if positions.interpolation_mode == "bilinear":
                positions.__class__ = NPUPositions
            encoder = self.vision_tower.encoder
            encoder.rope_2d = AxisRotations(encoder.rope_2d)
            for block in encoder.blocks:
                block.__class__ = NPUMoonViTEncoderLayer
