"""Qwen2-VL and Qwen2.5-VL, with all metadata of their encoders from the host.

vLLM's encoders accept metadata from their caller. A hook on the encoder supplies it: computed on
the host (once per image size if it depends on nothing else) and copied to the device from pinned
memory, so that no forward waits for the device. Qwen3-VL does this itself.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention
from vllm.model_executor.models import qwen2_5_vl, qwen2_vl
from vllm.utils.cache import LRUCache
from vllm.utils.torch_utils import async_tensor_h2d

Metadata = dict[str, torch.Tensor | None]
Grid = list[list[int]]  # [frames, height, width] of each image or video, in patches

MAX_SIZES = 1024  # most sizes of images to cache


class NPUQwen2VLForConditionalGeneration(qwen2_vl.Qwen2VLForConditionalGeneration):
    """vLLM's model, with the encoder's metadata from the host."""

    splits_multimodal_steps: ClassVar[bool] = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        # The device argument concerns only cu_seqlens, whose values attention needs on the host.
        give_metadata(
            self.visual,
            lambda grid: self.visual.prepare_encoder_metadata(grid, device=torch.device("cpu")),
        )


class NPUQwen2_5_VLForConditionalGeneration(  # noqa: N801
    qwen2_5_vl.Qwen2_5_VLForConditionalGeneration
):
    """vLLM's model, with the encoder's metadata from the host."""

    splits_multimodal_steps: ClassVar[bool] = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        give_metadata(self.visual, _Windows(self.visual).metadata)


def give_metadata(encoder: nn.Module, metadata_of: Callable[[Grid], Metadata]) -> None:
    """Supplies metadata to calls of `encoder` without it."""

    def give(
        module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if options.get("encoder_metadata") is None:
            grid = options["grid_thw"] if "grid_thw" in options else arguments[1]
            rows = grid.tolist() if isinstance(grid, torch.Tensor) else grid
            options = {**options, "encoder_metadata": metadata_of(rows)}
        return arguments, options

    encoder.register_forward_pre_hook(give, with_kwargs=True)


class _Size(NamedTuple):
    """Tables for images of one size, with merged patches in window order.

    cos, sin: [patches, rotary entries], on the device
    order:    [merged patches], the merged patch at each position
    ends:     ends of the windows in patches, cumulative, without repetition
    """

    cos: torch.Tensor
    sin: torch.Tensor
    order: np.ndarray
    ends: np.ndarray


class _Windows:
    """Metadata of Qwen2.5-VL's encoder, in which most blocks attend only within windows."""

    def __init__(self, encoder: qwen2_5_vl.Qwen2_5_VisionTransformer) -> None:
        self._encoder = encoder
        self._sizes: LRUCache[tuple[int, int, int], _Size] = LRUCache(capacity=MAX_SIZES)

    def metadata(self, grid: Grid) -> Metadata:
        encoder = self._encoder
        sizes = [self._size(*map(int, size)) for size in grid]
        merged = np.cumsum([0, *(len(size.order) for size in sizes)])
        patches = merged * encoder.spatial_merge_unit
        order = np.concatenate([size.order + at for size, at in zip(sizes, merged, strict=False)])
        inverse = np.empty_like(order)
        inverse[order] = np.arange(len(order))
        window_ends = [size.ends + at for size, at in zip(sizes, patches, strict=False)]
        frame_lengths = np.concatenate([np.repeat(h * w, t) for t, h, w in grid])
        full, window = (
            np.concatenate([[0], ends]).astype(np.int32)
            for ends in (np.cumsum(frame_lengths), np.concatenate(window_ends))
        )
        device = encoder.device
        return {
            "rotary_pos_emb_cos": torch.cat([size.cos for size in sizes]),
            "rotary_pos_emb_sin": torch.cat([size.sin for size in sizes]),
            "window_index": async_tensor_h2d(order, device),
            "reverse_indices": async_tensor_h2d(inverse, device),
            **self._of_sequences("", "full", full),
            **self._of_sequences("window_", "window", window),
        }

    def _of_sequences(self, prefix: str, suffix: str, cu_seqlens: np.ndarray) -> Metadata:
        encoder = self._encoder
        backend = encoder.attn_backend
        longest = MMEncoderAttention.compute_max_seqlen(backend, cu_seqlens)
        return {
            f"cu_{prefix}seqlens": MMEncoderAttention.maybe_recompute_cu_seqlens(
                backend, cu_seqlens, encoder.hidden_size, encoder.tp_size, encoder.device
            ),
            f"sequence_lengths_{suffix}": MMEncoderAttention.maybe_compute_seq_lens(
                backend, cu_seqlens, encoder.device
            ),
            f"max_seqlen_{suffix}": torch.tensor(longest, dtype=torch.int32),
        }

    def _size(self, frames: int, height: int, width: int) -> _Size:
        key = frames, height, width
        if key not in self._sizes:
            self._sizes[key] = self._make(frames, height, width)
        return self._sizes[key]

    def _make(self, frames: int, height: int, width: int) -> _Size:
        encoder = self._encoder
        merge, unit = encoder.spatial_merge_size, encoder.spatial_merge_unit
        side = encoder.window_size // merge // encoder.patch_size  # of a window, in merged patches
        rows, columns = height // merge, width // merge

        # Windows are ordered row by row, and merged patches row by row within them; windows at the
        # lower and right edges are smaller. Frames follow each other.
        row, column = np.indices((rows, columns)).reshape(2, -1)
        across = -(-columns // side)
        window = row // side * across + column // side
        in_frame = np.argsort(window, kind="stable")
        order = (np.arange(frames)[:, None] * len(in_frame) + in_frame).reshape(-1)
        ends = np.cumsum(np.tile(np.bincount(window), frames)) * unit

        # A merged patch's own patches, row by row: row and column of each in the image.
        inner_row, inner_column = np.indices((merge, merge)).reshape(2, -1)
        places = np.stack(
            [
                row[in_frame, None] * merge + inner_row,
                column[in_frame, None] * merge + inner_column,
            ],
            axis=-1,
        ).reshape(-1, 2)
        cos, sin = encoder.rotary_pos_emb.get_cos_sin(max(height, width))
        at = async_tensor_h2d(np.tile(places, (frames, 1)), encoder.device)
        return _Size(cos[at].flatten(1), sin[at].flatten(1), order, ends)
