"""Operands with the spread of real models, as functions of a generator."""

from collections.abc import Callable

import torch
from torch import Generator, Tensor

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BFLOAT16, FLOAT16)
BLOCK_SIZE = 128
CAUSAL = 3  # sparse mode
CAUSAL_MASK = torch.ones(2048, 2048, dtype=torch.int8).triu(1)
# A step's requests: new tokens, and all tokens.
STEPS = {
    "decode": ([1, 1, 1, 1], [300, 7, 128, 129]),
    "prefill": ([200], [200]),
    "mixed": ([1, 70, 3], [513, 200, 3]),
}

Operand = Callable[[Generator], Tensor]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def normal(*sizes: int, dtype: torch.dtype = BFLOAT16, scale: float = 1.0) -> Operand:
    """Normally distributed values, like rows between layers."""
    return lambda generator: (torch.randn(sizes, generator=generator) * scale).to(dtype)


def weight(*sizes: int, dtype: torch.dtype = BFLOAT16) -> Operand:
    """A weight [..., in, out] that preserves the magnitude of its input."""
    return normal(*sizes, dtype=dtype, scale=sizes[-2] ** -0.5)


def gains(size: int, dtype: torch.dtype = BFLOAT16) -> Operand:
    """Weights of a norm, around 1."""
    return lambda generator: (1 + 0.1 * torch.randn(size, generator=generator)).to(dtype)


def integers(least: int, most: int, *sizes: int, dtype: torch.dtype = torch.int64) -> Operand:
    """Random integers from `least` to `most` - 1."""
    return lambda generator: torch.randint(least, most, sizes, generator=generator, dtype=dtype)


def int8(*sizes: int) -> Operand:
    return integers(-127, 128, *sizes, dtype=torch.int8)


def scales(
    *sizes: int, least: float = 1e-3, most: float = 4e-3, dtype: torch.dtype = FLOAT32
) -> Operand:
    """Uniformly distributed scales, like those of int8 weights."""
    return lambda generator: (torch.rand(sizes, generator=generator) * (most - least) + least).to(
        dtype
    )


def zeros(*sizes: int, dtype: torch.dtype = BFLOAT16) -> Operand:
    """Zeros for memory that the call writes."""
    return lambda _: torch.zeros(sizes, dtype=dtype)


def permuted(count: int, *sizes: int) -> Operand:
    """A permutation of 0 to count - 1, int32."""
    return lambda generator: (
        torch.randperm(count, generator=generator).int().view(sizes or (count,))
    )


def table(size: int, rotary_size: int, dtype: torch.dtype = BFLOAT16) -> Operand:
    """[size, rotary_size]: each position's cosines, then its sines."""

    def made(generator: Generator) -> Tensor:
        angles = torch.rand(size, rotary_size // 2, generator=generator) * 6.28
        return torch.cat([angles.cos(), angles.sin()], 1).to(dtype)

    return made


def cos_sin(*sizes: int, dtype: torch.dtype = BFLOAT16) -> dict[str, Tensor]:
    """`cos` and `sin` of angles [..., rope], each value for both entries of a pair."""
    angles = torch.rand((*sizes[:-1], sizes[-1] // 2), generator=Generator().manual_seed(7)) * 6.28
    both = angles.repeat_interleave(2, -1)
    return {"cos": both.cos().to(dtype), "sin": both.sin().to(dtype)}


def blocks_of(lengths: list[int]) -> Tensor:
    """A block table [requests, most blocks], int32, with each block once."""
    width = max(-(-length // BLOCK_SIZE) for length in lengths)
    order = torch.randperm(len(lengths) * width, generator=Generator().manual_seed(sum(lengths)))
    return order.view(len(lengths), width).int()


def slots_of(queries: list[int], lengths: list[int]) -> Tensor:
    """Cache slots of new tokens under `blocks_of(lengths)`: [tokens], int32."""
    positions = [
        (request, position)
        for request, (new, length) in enumerate(zip(queries, lengths, strict=True))
        for position in range(length - new, length)
    ]
    blocks = blocks_of(lengths)
    return torch.tensor(
        [int(blocks[r, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE for r, p in positions],
        dtype=torch.int32,
    )


def ends_of(lengths: list[int]) -> list[int]:
    """Cumulative sums."""
    return torch.tensor(lengths).cumsum(0).tolist()
