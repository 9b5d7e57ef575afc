"""Copies, casts and layout changes equal torch's on the CPU."""

import ctypes

import pytest
import torch
import torch.nn.functional as F
import torch_npu
from hypothesis import given
from hypothesis import strategies as st

from vllm_davinci_testing.operators.aclnn import call
from vllm_davinci_testing.operators.comparison import compare
from vllm_davinci_testing.operators.strategies import (
    ALL,
    FLOATS,
    INTEGERS,
    NUMBERS,
    SHAPES,
    Pair,
    operands,
    tensors,
)

MATRICES = ((1, 1), (3, 5), (7, 4), (2, 3, 67), (2, 0, 3), (2, 2, 4, 4))


@given(x=tensors(ALL, low=0, high=100), dtype=st.sampled_from(ALL))
def test_casts_equal_torch(x: Pair, dtype: torch.dtype) -> None:
    compare(x.npu.to(dtype), x.cpu.to(dtype))


@pytest.mark.parametrize("dtype", [torch.int32, torch.float16, torch.bool])
@given(x=tensors(FLOATS, low=0, high=100))
def test_npu_dtype_cast_equals_torch(dtype: torch.dtype, x: Pair) -> None:
    compare(torch_npu.npu_dtype_cast(x.npu, dtype), x.cpu.to(dtype))


@given(pair=operands(ALL, special=True), dtype=st.sampled_from(FLOATS))
def test_copies_cast_and_broadcast(pair: tuple[Pair, Pair], dtype: torch.dtype) -> None:
    x, y = pair
    shape = torch.broadcast_shapes(x.cpu.shape, y.cpu.shape)
    npu, cpu = torch.empty(shape, dtype=dtype, device="npu"), torch.empty(shape, dtype=dtype)
    compare(npu.copy_(y.npu), cpu.copy_(y.cpu))
    compare(x.npu.contiguous(), x.cpu.contiguous())
    compare(x.npu.clone(), x.cpu.clone())


@given(x=tensors(ALL, shapes=((4, 6), (2, 3, 67))))
def test_copies_into_views_leave_the_rest_alone(x: Pair) -> None:
    npu, cpu = torch.zeros(8, 8, 80, device="npu"), torch.zeros(8, 8, 80)
    for target, source in ((npu, x.npu), (cpu, x.cpu)):
        view = target.transpose(0, 2)[1 : 1 + source.size(-1), 2 : 2 + source.size(-2), 0]
        view.copy_(source.flatten(0, -2)[: source.size(-2)].t())
    compare(npu, cpu)


@given(x=tensors(NUMBERS, shapes=((3, 5), (1, 4, 1), (2, 3, 67))), dim=st.sampled_from((0, 1, -1)))
def test_joining_equals_torch(x: Pair, dim: int) -> None:
    npu, cpu = x.npu, x.cpu
    compare(torch.cat([npu, npu * 2, npu], dim), torch.cat([cpu, cpu * 2, cpu], dim))
    compare(
        torch.cat([torch.empty(0, device="npu"), npu.float()], dim),
        torch.cat([torch.empty(0), cpu.float()], dim),
    )
    compare(torch.cat([npu, npu.float()], dim), torch.cat([cpu, cpu.float()], dim))
    compare(torch.stack([npu, npu * 2], dim), torch.stack([cpu, cpu * 2], dim))


@given(x=tensors(NUMBERS, shapes=((7,), (3, 7), (7, 2, 3))), sizes=st.permutations((1, 4, 0, 2)))
def test_splitting_equals_torch(x: Pair, sizes: list[int]) -> None:
    dim = x.cpu.shape.index(7)
    compare(torch.split(x.npu, sizes, dim), torch.split(x.cpu, sizes, dim))
    compare(
        torch.split_with_sizes_copy(x.npu, sizes, dim),
        torch.split_with_sizes_copy(x.cpu, sizes, dim),
    )
    parts = list(torch.split(torch.empty_like(x.npu.contiguous()), sizes, dim))
    call("SplitWithSize", x.npu.contiguous(), tuple(sizes), dim, parts)
    compare(parts, torch.split(x.cpu, sizes, dim))


@given(x=tensors(ALL, shapes=((), (3,), (2, 3), (2, 0))), repeats=st.sampled_from(((2, 1), (1, 3))))
def test_repeat_equals_torch(x: Pair, repeats: tuple[int, ...]) -> None:
    compare(x.npu.repeat(*repeats), x.cpu.repeat(*repeats))
    compare(x.npu.tile(repeats), x.cpu.tile(repeats))


@given(x=tensors(NUMBERS, shapes=((5,), (3, 5), (2, 5, 3))), seed=st.integers(0, 100))
def test_repeat_interleave_equals_torch(x: Pair, seed: int) -> None:
    counts = torch.randint(0, 4, (5,), generator=torch.Generator().manual_seed(seed))
    dim = x.cpu.shape.index(5)
    device = counts.npu()
    compare(x.npu.repeat_interleave(device, dim), x.cpu.repeat_interleave(counts, dim))
    compare(x.npu.repeat_interleave(3, dim), x.cpu.repeat_interleave(3, dim))
    compare(x.npu.repeat_interleave(2), x.cpu.repeat_interleave(2))
    compare(torch.repeat_interleave(device), torch.repeat_interleave(counts))
    total = int(counts.sum())
    compare(
        x.npu.repeat_interleave(device, dim, output_size=total),
        x.cpu.repeat_interleave(counts, dim),
    )
    if x.cpu.dim() == 1:
        compare(x.npu.repeat_interleave(device), x.cpu.repeat_interleave(counts))


@given(x=tensors(ALL, shapes=SHAPES[2:]))
def test_flip_and_roll_equal_torch(x: Pair) -> None:
    dims = (0, x.cpu.dim() - 1) if x.cpu.dim() > 1 else (0,)
    compare(x.npu.flip(dims), x.cpu.flip(dims))
    compare(x.npu.roll(2, 0), x.cpu.roll(2, 0))
    compare(x.npu.roll(-3), x.cpu.roll(-3))


@given(
    x=tensors(NUMBERS, shapes=((3, 5), (1, 4, 2), (2, 0, 3))),
    pad=st.sampled_from(((1, 2), (0, 3, 1, 0), (2, -1))),
    value=st.sampled_from((0, 2)),
)
def test_constant_padding_equals_torch(x: Pair, pad: tuple[int, ...], value: int) -> None:
    compare(F.pad(x.npu, pad, value=value), F.pad(x.cpu, pad, value=value))


@given(x=tensors(ALL, shapes=MATRICES), diagonal=st.integers(-3, 3))
def test_triangles_equal_torch(x: Pair, diagonal: int) -> None:
    compare(torch.triu(x.npu, diagonal), torch.triu(x.cpu, diagonal))
    compare(torch.tril(x.npu, diagonal), torch.tril(x.cpu, diagonal))
    compare(x.npu.clone().triu_(diagonal), x.cpu.clone().triu_(diagonal))
    compare(x.npu.clone().tril_(diagonal), x.cpu.clone().tril_(diagonal))


@given(
    x=tensors(FLOATS, shapes=((1, 3, 6, 6), (2, 1, 5, 9))),
    padding=st.integers(0, 1),
    stride=st.integers(1, 3),
)
def test_unfold_equals_torch(x: Pair, padding: int, stride: int) -> None:
    compare(
        F.unfold(x.npu, (2, 3), padding=padding, stride=stride),
        F.unfold(x.cpu, (2, 3), padding=padding, stride=stride),
    )


@given(x=tensors(INTEGERS, shapes=((4, 6),)))
def test_a_copy_may_overlap_its_source(x: Pair) -> None:
    npu, cpu = x.npu.clone(), x.cpu.clone()
    npu[:, :3].copy_(npu[:, 3:])
    cpu[:, :3].copy_(cpu[:, 3:])
    compare(npu, cpu)


def test_a_cast_to_another_dtype_than_the_output_has_is_refused() -> None:
    x = torch.zeros(3, device="npu")
    with pytest.raises(RuntimeError, match="aclnnCast: dtype differs"):
        call("Cast", x, ctypes.c_int32(1), torch.empty_like(x))
