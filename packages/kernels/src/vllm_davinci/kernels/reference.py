"""Definition of every operator in plain torch: same names, arguments and results.

They run on any device. Norms, softmax and products accumulate in fp32; results are rounded once to
the dtype of the output. The tests and the meta functions are held against these.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Root-mean-square normalization over the last dimension.

    x:      [..., hidden_size]
    weight: [hidden_size]
    Source: Zhang and Sennrich 2019, eq. 4.
    """
    return _normalized(x, weight, epsilon).to(x.dtype)


def _normalized(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * weight.float()


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Norm of x + residual, and that sum, both [..., hidden_size]."""
    total = (x.float() + residual.float()).to(x.dtype)
    return rms_norm(total, weight, epsilon), total


def add_rms_norm_quant(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    scale: Tensor,
    offset: Tensor,
    bias: Tensor | None,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, quantized with a given scale, and that sum.

    scale:  [1] or [hidden_size]; what one step of the integers is worth
    offset: int32, like scale; the integer that stands for zero
    bias:   [hidden_size], added to the norm before it is quantized, or None
    Returns int8 [..., hidden_size] and the sum in x's dtype.
    """
    total = (x.float() + residual.float()).to(x.dtype)
    normalized = _normalized(total, weight, epsilon)
    if bias is not None:
        normalized = normalized + bias.float()
    integers = torch.round(normalized / scale.float() + offset.float())
    return integers.clamp(-128, 127).to(torch.int8), total


def add_rms_norm_dynamic_quant(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of x + residual with a scale per row, and that sum.

    Returns int8 [..., hidden_size], fp32 scales [...] and the sum in x's dtype.
    """
    normalized, total = add_rms_norm(x, residual, weight, epsilon)
    integers, scales = dynamic_quant(normalized)
    return integers, scales, total


def dynamic_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as integers with one scale each: x is about integers * scale."""
    wide = x.float()
    scales = wide.abs().amax(-1) / 127
    steps = torch.where(scales == 0, 1, scales).unsqueeze(-1)
    return torch.round(wide / steps).clamp(-128, 127).to(torch.int8), scales


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    is_neox_style: bool,
) -> tuple[Tensor, Tensor]:
    """Rotates the first rotary_dim entries of every head by its token's position.

    positions:     [num_tokens], int64
    query:         [num_tokens, num_heads * head_size]
    key:           [num_tokens, num_kv_heads * head_size]
    cos_sin_cache: [max_position, rotary_dim], cosines, then sines
    is_neox_style: pairs are (i, i + rotary_dim / 2), otherwise (2 i, 2 i + 1)
    Returns new tensors. Source: Su et al. 2021, eq. 34.
    """
    cos, sin = cos_sin_cache[positions].float().unsqueeze(1).chunk(2, dim=-1)
    rotary_dim = cos_sin_cache.shape[1]

    def rotated(rows: Tensor) -> Tensor:
        heads = rows.view(rows.shape[0], -1, head_size)
        turning, rest = heads[..., :rotary_dim].float(), heads[..., rotary_dim:]
        if is_neox_style:
            first, second = turning.chunk(2, dim=-1)
        else:
            first, second = turning[..., ::2], turning[..., 1::2]
        pair = (first * cos - second * sin, second * cos + first * sin)
        turned = torch.cat(pair, -1) if is_neox_style else torch.stack(pair, -1).flatten(-2)
        return torch.cat([turned.to(rows.dtype), rest], -1).view_as(rows)

    return rotated(query), rotated(key)


def vocabulary_mask(token_ids: Tensor, first_row: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Rows of a rank's share [first_row, first_row + num_rows) of the embedding.

    token_ids: int32 or int64, any sizes
    Returns the row in the share, 0 for a token of another rank, and whether it is one (bool).
    """
    rows = token_ids - first_row
    is_foreign = (rows < 0) | (rows >= num_rows)
    return rows.masked_fill(is_foreign, 0), is_foreign


def vocab_parallel_embedding(
    token_ids: Tensor, weight: Tensor, first_row: int, num_rows: int
) -> Tensor:
    """A rank's part of the embedding: rows of its tokens, zeros for the others.

    token_ids: [num_tokens], int32 or int64
    weight:    [at least num_rows, embedding_dim], the share
    Returns [num_tokens, embedding_dim]; the sum over ranks is the embedding.
    """
    rows, is_foreign = vocabulary_mask(token_ids, first_row, num_rows)
    return weight[rows.long()].masked_fill(is_foreign.unsqueeze(-1), 0)


def copy_kv_blocks(kv_caches: list[Tensor], block_pairs: Tensor) -> None:
    """Copies blocks inside every cache, one pair after the other.

    kv_caches:   each [num_blocks, ...], contiguous; written in place
    block_pairs: [num_pairs, 2], int64, on the host: from, to
    """
    for cache in kv_caches:
        for source, target in block_pairs.tolist():
            cache[target] = cache[source]
