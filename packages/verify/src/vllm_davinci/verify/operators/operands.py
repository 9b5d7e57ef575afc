"""Operands with the spread that they have in models."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BFLOAT16, FLOAT16)
BLOCK_SIZE = 128


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def normal(
    generator: Generator, *sizes: int, dtype: torch.dtype = BFLOAT16, scale: float = 1.0
) -> Tensor:
    """Rows as they stand between layers."""
    return (torch.randn(sizes, generator=generator) * scale).to(dtype)


def weight(generator: Generator, *sizes: int, dtype: torch.dtype = BFLOAT16) -> Tensor:
    """A matrix [..., in, out] that keeps the size of what it multiplies."""
    return normal(generator, *sizes, dtype=dtype, scale=sizes[-2] ** -0.5)


def gains(generator: Generator, size: int, dtype: torch.dtype = BFLOAT16) -> Tensor:
    """Weights of a norm, around 1."""
    return (1 + 0.1 * torch.randn(size, generator=generator)).to(dtype)


def int8(generator: Generator, *sizes: int) -> Tensor:
    return torch.randint(-127, 128, sizes, generator=generator, dtype=torch.int8)


def scales(generator: Generator, *sizes: int, least: float = 1e-3, most: float = 4e-3) -> Tensor:
    """fp32, as those of int8 weights."""
    return torch.rand(sizes, generator=generator) * (most - least) + least


def permuted(generator: Generator, count: int) -> Tensor:
    return torch.randperm(count, generator=generator)


def cos_sin(generator: Generator, *sizes: int, dtype: torch.dtype = BFLOAT16) -> list[Tensor]:
    """Cosines and sines, each value for both entries of a pair: [..., rope] both."""
    angles = torch.rand((*sizes[:-1], sizes[-1] // 2), generator=generator) * 6.28
    both = angles.repeat_interleave(2, -1)
    return [both.cos().to(dtype), both.sin().to(dtype)]


def blocks_of(
    generator: Generator, lengths: list[int], block_size: int = BLOCK_SIZE
) -> tuple[Tensor, int]:
    """A block table [requests, most blocks], int32, in any order; and how many blocks it names."""
    width = max(-(-length // block_size) for length in lengths)
    count = len(lengths) * width
    return permuted(generator, count).view(len(lengths), width).int(), count


def slots_of(
    table: Tensor, queries: list[int], lengths: list[int], block_size: int = BLOCK_SIZE
) -> Tensor:
    """Where each new token's row of the cache is: [tokens], int32."""
    return torch.tensor(
        [
            int(table[request, position // block_size]) * block_size + position % block_size
            for request, (new, length) in enumerate(zip(queries, lengths, strict=True))
            for position in range(length - new, length)
        ],
        dtype=torch.int32,
    )


def ends_of(lengths: list[int]) -> list[int]:
    """Cumulative sums."""
    return torch.tensor(lengths).cumsum(0).tolist()
