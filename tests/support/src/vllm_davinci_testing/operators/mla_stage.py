"""The stage before MLA: weights, and tokens for its cache."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HIDDEN, HEADS, NOPE, ROPE, KV_LORA, VALUE, BLOCK = 96, 4, 32, 64, 512, 32, 128
EPSILON = 1e-6
FRACTAL_NZ = 29


class Block:
    """One block's weights and cache, with tokens that the stage writes there."""

    def __init__(self, dtype: torch.dtype, q_lora_rank: int | None, num_tokens: int) -> None:
        generator = torch.Generator().manual_seed(num_tokens)

        def normal(*sizes: int) -> torch.Tensor:
            return (torch.randn(sizes, generator=generator) / sizes[0] ** 0.5).to(dtype).npu()

        self.q_lora_rank = q_lora_rank
        self.x = normal(num_tokens, HIDDEN) * num_tokens**0.5
        # Stored as [out, in] and used transposed, as in a linear layer.
        self.a_weight = normal((q_lora_rank or 0) + KV_LORA + ROPE, HIDDEN).t()
        self.q_a_norm = None if q_lora_rank is None else normal(q_lora_rank)
        self.q_b_weight = normal(HEADS * (NOPE + ROPE), q_lora_rank or HIDDEN).t()
        self.kv_a_norm = normal(KV_LORA)
        self.W_UK, self.W_UV = normal(HEADS, NOPE, KV_LORA), normal(HEADS, KV_LORA, VALUE)
        angles = torch.rand(num_tokens, 1, 1, ROPE // 2, generator=generator) * 6
        self.cos, self.sin = (
            f.repeat(1, 1, 1, 2).to(dtype).npu() for f in (angles.cos(), angles.sin())
        )
        slots = torch.randperm(4 * BLOCK, generator=generator)[:num_tokens]
        slots[num_tokens // 2] = -1
        self.slots = slots.npu()
        self.caches = [torch.zeros(4, BLOCK, 1, n).to(dtype).npu() for n in (KV_LORA, ROPE)]

    def key_arguments(self) -> list[object]:
        rotation = (self.cos, self.sin, self.slots)
        return [self.kv_a_norm, self.W_UK, *rotation, *self.caches, EPSILON, EPSILON]

    def arguments(self) -> list[object]:
        return [self.x, self.a_weight, self.q_a_norm, self.q_b_weight, *self.key_arguments()]


@dataclass
class Projection:
    """An int8 weight with its product's tensors; static products have a bias of the sums."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    @classmethod
    def make(cls, columns: int, rows: int, dtype: torch.dtype, is_dynamic: bool) -> "Projection":
        generator = torch.Generator().manual_seed(columns)
        stored = torch.randint(-128, 128, (columns, rows), generator=generator, dtype=torch.int8)
        weight = stored.npu().t()
        # Sums are about 74 * 74 * sqrt(rows), results then about one.
        scale = (torch.rand(columns, generator=generator) + 0.5) / 5500 / rows**0.5
        if is_dynamic:  # rows have scales of about 1 / 40
            return cls(weight, scale.npu() * 40, None)
        bias = torch.randint(-9000, 9000, (columns,), generator=generator, dtype=torch.int32)
        if dtype == torch.float16:
            scale = scale.view(torch.int32).long()
        return cls(weight, scale.npu(), bias.npu())


class IntegerBlock(Block):
    """A block with int8 projections and quantized rows."""

    def __init__(
        self,
        dtype: torch.dtype,
        q_lora_rank: int | None,
        num_tokens: int,
        is_dynamic: bool,
        has_norm_bias: bool = False,
    ) -> None:
        super().__init__(dtype, q_lora_rank, num_tokens)
        self.dtype = dtype
        columns = (q_lora_rank or 0) + KV_LORA + ROPE
        kind = (dtype, is_dynamic)
        self.a = Projection.make(columns, HIDDEN, *kind)
        self.b = Projection.make(HEADS * (NOPE + ROPE), q_lora_rank or HIDDEN, *kind)
        generator = torch.Generator().manual_seed(num_tokens)
        self.rows = torch.randint(
            -128, 128, (num_tokens, HIDDEN), generator=generator, dtype=torch.int8
        ).npu()
        self.row_scale = None
        if is_dynamic:
            self.row_scale = (torch.rand(num_tokens, generator=generator) + 0.5).npu() / 40
        self.norm_bias = self.input_scale = self.input_offset = None
        if q_lora_rank is not None:
            if has_norm_bias:
                self.norm_bias = torch.randn(q_lora_rank, generator=generator).to(dtype).npu()
            if not is_dynamic:
                self.input_scale = torch.tensor([0.0123]).npu()
                self.input_offset = torch.tensor([-7], dtype=torch.int32).npu()

    def arguments(self) -> list[object]:
        return [
            self.rows,
            self.row_scale,
            self.a.weight,
            self.a.scale,
            self.a.bias,
            self.q_a_norm,
            self.norm_bias,
            self.input_scale,
            self.input_offset,
            self.b.weight,
            self.b.scale,
            self.b.bias,
            *self.key_arguments(),
        ]


def assert_repeats(make: Callable[[], Block], stage: Callable[..., Any], turns: int) -> None:
    """Repeats the stage with three decodes and a side stream; asserts the same bits every time."""
    expected, side = None, torch.npu.Stream()
    for _ in range(turns):
        block = make()
        results = stage(*block.arguments(), 3, side_stream=side)
        found = [t.cpu() for t in (*results, *block.caches)]
        expected = expected or found
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def near(npu: torch.Tensor, expected: torch.Tensor) -> None:
    # Products over up to 512 entries of about one, summed in another order.
    limit = 512 * torch.finfo(torch.float32).eps
    if expected.dtype != torch.float32:
        limit = 32 * torch.finfo(expected.dtype).eps
    torch.testing.assert_close(npu.cpu(), expected, rtol=limit, atol=limit)
