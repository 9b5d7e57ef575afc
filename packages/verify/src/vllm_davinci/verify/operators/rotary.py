"""Rotary embeddings. Source: Su et al. 2021, eq. 34."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Generator, Tensor

from vllm_davinci.verify.operators.call import OperatorCall
from vllm_davinci.verify.operators.operands import DTYPES, cos_sin, name_of, normal
from vllm_davinci.verify.operators.shapes import ModelSizes

POSITIONS = 4096


def rotated_halves(
    positions: Tensor, query: Tensor, key: Tensor, table: Tensor, head_size: int
) -> tuple[Tensor, Tensor]:
    """Pairs (i, i + rotary_size / 2) of each head's first entries; the rest stays."""
    cos, sin = table[positions].float().unsqueeze(1).chunk(2, -1)

    def turned(rows: Tensor) -> Tensor:
        heads = rows.view(rows.shape[0], -1, head_size)
        turning, rest = heads.split([table.shape[1], head_size - table.shape[1]], -1)
        first, second = turning.float().chunk(2, -1)
        both = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        return torch.cat([both.to(rows.dtype), rest], -1).view_as(rows)

    return turned(query), turned(key)


def rotated_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Entries (2 i, 2 i + 1) together; results lie at i and i + size / 2."""
    even, odd = x[..., ::2].float(), x[..., 1::2].float()
    turned = torch.cat([even, odd], -1) * cos.float() + torch.cat([-odd, even], -1) * sin.float()
    return turned.to(x.dtype)


def calls(model: ModelSizes) -> Iterator[OperatorCall]:
    for dtype in DTYPES:
        for tokens in (16, 200):
            yield _of_pairs(model, tokens, dtype) if model.latent else _of(model, tokens, dtype)


def _of(model: ModelSizes, tokens: int, dtype: torch.dtype) -> OperatorCall:
    import torch_npu

    def make(generator: Generator) -> dict[str, Any]:
        angles = torch.rand(POSITIONS, model.rotary_size // 2, generator=generator) * 6.28
        return {
            "positions": torch.randint(0, POSITIONS, (tokens,), generator=generator),
            "query": normal(generator, tokens, model.heads * model.head_size, dtype=dtype),
            "key": normal(generator, tokens, model.kv_heads * model.head_size, dtype=dtype),
            "table": torch.cat([angles.cos(), angles.sin()], 1).to(dtype),
            "head_size": model.head_size,
        }

    def call(positions: Tensor, query: Tensor, key: Tensor, table: Tensor, head_size: int) -> Any:
        return torch_npu.npu_mrope(
            positions, query, key, table, head_size, mrope_section=[0, 0, 0], rotary_mode="half"
        )

    said = f"{tokens} tokens, {name_of(dtype)}"
    return OperatorCall("npu_mrope", "RopeWithSinCosCache", said, make, call, rotated_halves)


def _of_pairs(model: ModelSizes, tokens: int, dtype: torch.dtype) -> OperatorCall:
    import torch_npu

    assert model.latent is not None
    rope = model.latent.rope

    def make(generator: Generator) -> dict[str, Any]:
        cos, sin = cos_sin(generator, tokens, 1, 1, rope, dtype=dtype)
        x = normal(generator, tokens, model.heads, 1, rope, dtype=dtype)
        return {"x": x, "cos": cos, "sin": sin}

    said = f"{tokens} tokens, {name_of(dtype)}"
    call = torch_npu.npu_interleave_rope
    return OperatorCall("npu_interleave_rope", "InterleaveRope", said, make, call, rotated_pairs)
