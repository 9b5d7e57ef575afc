"""Sorting and search equal torch's on the CPU, including results of data-dependent length."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_davinci_testing.operators import aclnn
from vllm_davinci_testing.operators.comparison import compare
from vllm_davinci_testing.operators.strategies import (
    FLOATS,
    Pair,
    tensors,
    values,
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
    # Equal values may come in any order; their indices select equal values.
    if x.cpu.dim():
        compare(x.npu.gather(-1, npu.indices), cpu.values)


@given(x=tensors((torch.int32, torch.int64, torch.float32), low=-3, high=3))
def test_unique_equals_torch(x: Pair) -> None:
    rounded_npu, rounded_cpu = x.npu.round(), x.cpu.round()
    compare(torch.unique(rounded_npu), torch.unique(rounded_cpu))
    compare(
        torch.unique(rounded_npu, return_inverse=True, return_counts=True),
        torch.unique(rounded_cpu, return_inverse=True, return_counts=True),
    )
    # torch_npu calls another operator for the older function.
    compare(
        torch._unique(rounded_npu, sorted=True, return_inverse=True),
        torch._unique(rounded_cpu, sorted=True, return_inverse=True),
    )


def test_bucketize_operator_equals_torch() -> None:
    x, boundaries = values((3, 5), torch.float32, 1), values((9,), torch.float32, 2).sort().values
    out = torch.zeros(3, 5, dtype=torch.int32).npu()
    aclnn.call("Bucketize", x.npu(), boundaries.npu(), True, False, out)
    compare(out, torch.bucketize(x, boundaries, out_int32=True))
