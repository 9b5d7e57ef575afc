"""Sorting and search equal torch's on the CPU, including results of data-dependent length."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_davinci_testing.operators import aclnn
from vllm_davinci_testing.operators.comparison import compare
from vllm_davinci_testing.operators.strategies import (
    ALL,
    FLOATS,
    INTEGERS,
    NUMBERS,
    Pair,
    tensors,
    values,
)


@given(x=tensors((torch.float32, torch.bfloat16, *INTEGERS)), descending=st.booleans())
def test_stable_sort_equals_torch(x: Pair, descending: bool) -> None:
    for dim in range(-1, x.cpu.dim()):
        compare(
            torch.sort(x.npu, dim=dim, descending=descending, stable=True),
            torch.sort(x.cpu, dim=dim, descending=descending, stable=True),
        )


@given(x=tensors(FLOATS, special=True))
def test_sort_puts_nan_last(x: Pair) -> None:
    compare(torch.sort(x.npu, stable=True), torch.sort(x.cpu, stable=True))
    compare(torch.argsort(x.npu, stable=True), torch.argsort(x.cpu, stable=True))


@given(data=st.data(), x=tensors(FLOATS), largest=st.booleans())
def test_topk_equals_torch(data: st.DataObject, x: Pair, largest: bool) -> None:
    size = x.cpu.shape[-1] if x.cpu.dim() else 1
    k = data.draw(st.integers(0, size))
    npu, cpu = torch.topk(x.npu, k, largest=largest), torch.topk(x.cpu, k, largest=largest)
    compare(npu.values, cpu.values)
    # Equal values may come in any order; the values at the indices are determined.
    if x.cpu.dim():
        compare(x.npu.gather(-1, npu.indices), cpu.values)


@given(data=st.data(), x=tensors((torch.float32, torch.int32), ((7,), (3, 5), (2, 3, 67))))
def test_kthvalue_equals_torch(data: st.DataObject, x: Pair) -> None:
    k = data.draw(st.integers(1, x.cpu.shape[-1]))
    npu, cpu = torch.kthvalue(x.npu, k), torch.kthvalue(x.cpu, k)
    compare(npu.values, cpu.values)


@given(x=tensors((torch.int32, torch.int64, torch.float32), low=-3, high=3))
def test_unique_equals_torch(x: Pair) -> None:
    rounded_npu, rounded_cpu = x.npu.round(), x.cpu.round()
    compare(torch.unique(rounded_npu), torch.unique(rounded_cpu))
    compare(
        torch.unique(rounded_npu, return_inverse=True, return_counts=True),
        torch.unique(rounded_cpu, return_inverse=True, return_counts=True),
    )
    # torch_npu calls another operator through the older function.
    compare(
        torch._unique(rounded_npu, sorted=True, return_inverse=True),
        torch._unique(rounded_cpu, sorted=True, return_inverse=True),
    )


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_unique_consecutive_equals_torch(dim: int | None) -> None:
    x = torch.tensor([[1, 1, 2], [1, 1, 2], [2, 2, 2], [1, 1, 2]])
    kwargs = {"return_inverse": True, "return_counts": True, "dim": dim}
    compare(torch.unique_consecutive(x.npu(), **kwargs), torch.unique_consecutive(x, **kwargs))


@given(x=tensors((torch.float32, torch.int64)), right=st.booleans(), out_int32=st.booleans())
def test_searches_in_sorted_sequences_equal_torch(x: Pair, right: bool, out_int32: bool) -> None:
    sequence = values((13,), x.cpu.dtype, 3).sort().values
    kwargs = {"right": right, "out_int32": out_int32}
    compare(
        torch.searchsorted(sequence.npu(), x.npu, **kwargs),
        torch.searchsorted(sequence, x.cpu, **kwargs),
    )
    compare(
        torch.bucketize(x.npu, sequence.npu(), **kwargs), torch.bucketize(x.cpu, sequence, **kwargs)
    )
    compare(
        torch.searchsorted(sequence.npu(), 1, **kwargs), torch.searchsorted(sequence, 1, **kwargs)
    )


def test_searchsorted_takes_a_sorter() -> None:
    sequence = values((4, 9), torch.float32, 1)
    sorter = sequence.argsort(-1)
    x = values((4, 5), torch.float32, 2)
    compare(
        torch.searchsorted(sequence.npu(), x.npu(), sorter=sorter.npu()),
        torch.searchsorted(sequence, x, sorter=sorter),
    )


@given(x=tensors(ALL, low=-2, high=2))
def test_nonzero_equals_torch(x: Pair) -> None:
    compare(torch.nonzero(x.npu), torch.nonzero(x.cpu))


@given(x=tensors(NUMBERS, low=-2, high=2), invert=st.booleans())
def test_isin_with_a_scalar_equals_torch(x: Pair, invert: bool) -> None:
    compare(torch.isin(x.npu, 1, invert=invert), torch.isin(x.cpu, 1, invert=invert))
    compare(torch.isin(1, x.npu, invert=invert), torch.isin(1, x.cpu, invert=invert))


def test_bucketize_operator_equals_torch() -> None:
    x, boundaries = values((3, 5), torch.float32, 1), values((9,), torch.float32, 2).sort().values
    out = torch.zeros(3, 5, dtype=torch.int32).npu()
    aclnn.call("Bucketize", x.npu(), boundaries.npu(), True, False, out)
    compare(out, torch.bucketize(x, boundaries, out_int32=True))
