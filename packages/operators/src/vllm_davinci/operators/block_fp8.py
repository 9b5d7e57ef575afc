"""Converts fp8 weights with a scale per block, in host memory."""

from collections.abc import Sequence

import torch
from torch import Tensor


def block_fp8_floats(
    weight: Tensor,
    scale: Tensor,
    block_rows: int,
    block_columns: int,
    dtype: torch.dtype,
    spares: Sequence[Tensor],
) -> Tensor:
    """The values of an fp8 weight with a scale per block, each rounded once to `dtype`.

    weight: [out, in] float8_e4m3fn, contiguous, in host memory
    scale:  [ceil(out / block_rows), ceil(in / block_columns)] fp32
    dtype:  bfloat16 or float32
    spares: host tensors; the result may reuse the memory of one that is otherwise unused
    """
    wide = scale.repeat_interleave(block_rows, 0)[: weight.shape[0]]
    wide = wide.repeat_interleave(block_columns, 1)[:, : weight.shape[1]]
    return (weight.float() * wide).to(dtype)


def block_fp8_integers(
    weight: Tensor, scale: Tensor, block_rows: int, block_columns: int, spares: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """As block_fp8_floats, but rounds to int8 [out, in], with a scale per row, fp32 [out, 1].

    weight, scale, spares: as for block_fp8_floats
    """
    values = block_fp8_floats(weight, scale, block_rows, block_columns, torch.float32, spares)
    row_scale = values.abs().amax(1, keepdim=True) / 127
    row_scale = torch.where(row_scale == 0, torch.ones_like(row_scale), row_scale)
    return (values / row_scale).round().clamp(-128, 127).to(torch.int8), row_scale
