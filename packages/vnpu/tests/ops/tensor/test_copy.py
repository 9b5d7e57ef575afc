"""Copies, casts and layout changes equal torch's on the CPU."""

import ctypes

import pytest
import torch
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
    Pair,
    operands,
    tensors,
)


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
