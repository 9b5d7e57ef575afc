"""One layer's adapter weights as two matrices, of which vLLM's stacked tensors are views."""

from typing import Any

import torch
from vllm.lora.layers import (
    FusedMoEWithLoRA,
    LogitsProcessorWithLoRA,
    VocabParallelEmbeddingWithLoRA,
)
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA


class StackedSlices(tuple[torch.Tensor, ...]):
    """vLLM's tuple of stacked tensors, one per output slice, with their underlying matrix.

    A [max_loras, 1, rank, in] each: matrix [slices * max_loras * rank, in].
    B [max_loras, 1, out, rank] each: matrix [sum of out, slices * max_loras * rank], zero outside
    of each slice's own block, so that one product adds the deltas of all slices.
    """

    matrix: torch.Tensor


def stack_weights(layer: BaseLayerWithLoRA) -> None:
    """Gives a wrapped layer, which has no adapter yet, its two matrices.

    Raises NotImplementedError, with the class name, for a wrapper with other tensors.
    """
    kept: Any = layer
    if isinstance(layer, LogitsProcessorWithLoRA | VocabParallelEmbeddingWithLoRA):
        kept.lora_b_stacked = _columns_by_slot(kept.lora_b_stacked)
        if isinstance(layer, VocabParallelEmbeddingWithLoRA):
            kept.lora_a_stacked_2d, kept.lora_a_stacked = _table(kept.lora_a_stacked)
    elif isinstance(layer, FusedMoEWithLoRA):
        return  # created with its matrices
    elif isinstance(layer, BaseLinearLayerWithLoRA):
        kept.lora_a_stacked = _stack_a(kept.lora_a_stacked)
        kept.lora_b_stacked = _stack_b(kept.lora_b_stacked)
    else:
        raise NotImplementedError(f"layers of type {type(layer).__name__} take no adapters")


def columns(stacked: torch.Tensor) -> torch.Tensor:
    """The matrix [out, max_loras * rank] of a stacked B [max_loras, 1, out, rank]: a view."""
    max_loras, _, out, rank = stacked.shape
    return stacked.squeeze(1).permute(1, 0, 2).view(out, max_loras * rank)


def _columns_by_slot(stacked: torch.Tensor) -> torch.Tensor:
    """Zeros of the same shape, with a slot's columns adjacent in memory, as `columns` views it."""
    max_loras, _, out, rank = stacked.shape
    return _slots(stacked.new_zeros(out, max_loras * rank), max_loras, rank)


def _table(stacked: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A zero table [vocabulary, max_loras * rank], one row per token for all slots, and its view
    shaped like `stacked`, [max_loras, vocabulary, rank]."""
    max_loras, vocabulary, rank = stacked.shape
    table = stacked.new_zeros(vocabulary, max_loras * rank)
    return table, table.unflatten(1, (max_loras, rank)).permute(1, 0, 2)


def _slots(matrix: torch.Tensor, max_loras: int, rank: int) -> torch.Tensor:
    """[out, max_loras * rank] as a view [max_loras, 1, out, rank]."""
    return matrix.unflatten(1, (max_loras, rank)).permute(1, 0, 2).unsqueeze(1)


def _stack_a(slices: tuple[torch.Tensor, ...]) -> StackedSlices:
    max_loras, _, rank, size = slices[0].shape
    matrix = slices[0].new_zeros(len(slices) * max_loras * rank, size)
    stacked = StackedSlices(matrix.view(len(slices), max_loras, 1, rank, size).unbind())
    stacked.matrix = matrix
    return stacked


def _stack_b(slices: tuple[torch.Tensor, ...]) -> StackedSlices:
    max_loras, _, _, rank = slices[0].shape
    outs, width = [each.shape[2] for each in slices], max_loras * rank
    matrix = slices[0].new_zeros(sum(outs), len(slices) * width)
    blocks = [
        rows[:, index * width : (index + 1) * width]
        for index, rows in enumerate(matrix.split(outs))
    ]
    stacked = StackedSlices(_slots(block, max_loras, rank) for block in blocks)
    stacked.matrix = matrix
    return stacked
