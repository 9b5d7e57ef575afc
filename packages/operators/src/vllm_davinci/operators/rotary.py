"""Rotary embedding."""

import torch
from torch import Tensor


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


def rotated_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates pairs of entries (2 i, 2 i + 1); the results are at i and i + size / 2.

    x:        [..., size]
    cos, sin: broadcast to x, each value for both entries of a pair
    """
    even, odd = x[..., ::2].float(), x[..., 1::2].float()
    turned = torch.cat([even, odd], -1) * cos.float() + torch.cat([-odd, even], -1) * sin.float()
    return turned.to(x.dtype)
