"""Packs a model's tensors into few broadcasts: consecutive tensors share a buffer."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import ParamMeta

# Tensors begin at addresses that every operator accepts.
ALIGNMENT_BYTES = 512
DEFAULT_BUFFER_BYTES = 256 << 20


def announced(update: Any) -> list[ParamMeta]:
    """The tensors listed by an update: names, dtype_names and shapes."""
    rows = zip(update.names, update.dtype_names, update.shapes, strict=True)
    return [ParamMeta(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in rows]


def buffers(tensors: Sequence[ParamMeta], limit_bytes: int) -> list[list[ParamMeta]]:
    """Groups consecutive tensors into buffers of up to `limit_bytes`, or of one larger tensor."""
    found: list[list[ParamMeta]] = []
    room = 0
    for tensor in tensors:
        size = _padded_bytes(tensor)
        if not found or size > room:
            found.append([])
            room = limit_bytes
        found[-1].append(tensor)
        room -= size
    return found


def empty_buffer(tensors: Sequence[ParamMeta], device: torch.device) -> torch.Tensor:
    """An uninitialized uint8 buffer for these tensors."""
    size = sum(map(_padded_bytes, tensors))
    return torch.empty(size, dtype=torch.uint8, device=device)


def views(buffer: torch.Tensor, tensors: Iterable[ParamMeta]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor as a view of the buffer, with its name."""
    start = 0
    for tensor in tensors:
        size = math.prod(tensor.shape) * tensor.dtype.itemsize
        yield tensor.name, buffer[start : start + size].view(tensor.dtype).view(tensor.shape)
        start += _padded_bytes(tensor)


def filled(
    buffer: torch.Tensor, tensors: Sequence[ParamMeta], pairs: Iterator[tuple[str, torch.Tensor]]
) -> torch.Tensor:
    """Copies the next of `pairs` into the buffer. They may be on any device."""
    for (_, view), (_, tensor) in zip(views(buffer, tensors), pairs, strict=False):
        view.copy_(tensor)
    return buffer


def _padded_bytes(tensor: ParamMeta) -> int:
    size = math.prod(tensor.shape) * tensor.dtype.itemsize
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
