"""Tensors created from numbers equal torch's on the CPU."""

import pathlib
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_davinci_testing.operators.aclnn import Number, call
from vllm_davinci_testing.operators.comparison import compare
from vllm_davinci_testing.operators.strategies import ALL, FLOATS, NUMBERS, Pair, tensors


def _resident_bytes() -> int:
    status = pathlib.Path("/proc/self/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found.group(1)) * 1024


@given(x=tensors(ALL), value=st.sampled_from((0, 1, 3, 0.0, -0.0, 1.5)))
def test_fills_equal_torch(x: Pair, value: float) -> None:
    if x.npu.numel() == x.base.numel():  # an expanded tensor cannot be written
        compare(x.npu.fill_(value), x.cpu.fill_(value))
        compare(x.npu.zero_(), x.cpu.zero_())
        compare(x.npu.fill_(torch.tensor(value)), x.cpu.fill_(torch.tensor(value)))
        compare(x.npu.fill_(torch.tensor(value, device="npu")), x.cpu.fill_(torch.tensor(value)))
    compare(torch.zeros_like(x.npu), torch.zeros_like(x.cpu))
    compare(torch.ones_like(x.npu), torch.ones_like(x.cpu))
    compare(torch.full_like(x.npu, value), torch.full_like(x.cpu, value))


def test_filling_a_view_leaves_the_rest_alone() -> None:
    base = torch.ones(6, 8, device="npu")
    expected = torch.ones(6, 8)
    for view in (base[1:3, ::2], base.t()[3:5]):
        view.zero_()
    expected[1:3, ::2] = 0
    expected.t()[3:5] = 0
    compare(base, expected)


def test_negative_zero_keeps_its_sign() -> None:
    assert torch.full((4,), -0.0, device="npu").cpu().signbit().all()


def test_zeros_of_many_gigabytes_take_no_memory() -> None:
    before = _resident_bytes()
    big = torch.zeros(16 * 2**30, dtype=torch.int8, device="npu")
    assert big[12 * 2**30].item() == 0
    big[-1] = 5
    big.fill_(0)
    assert big[-1].item() == 0
    assert _resident_bytes() - before < 256 * 2**20


@given(
    start=st.integers(-5, 5),
    length=st.integers(0, 40),
    step=st.sampled_from((1, 2, -3, 0.5, 0.3)),
    dtype=st.sampled_from(NUMBERS),
)
def test_arange_equals_torch(start: int, length: int, step: float, dtype: torch.dtype) -> None:
    if not dtype.is_floating_point:
        step = int(step) or 1
        if dtype == torch.uint8:
            start, step = abs(start), abs(step)
    end = start + length * step
    compare(
        torch.arange(start, end, step, dtype=dtype, device="npu"),
        torch.arange(start, end, step, dtype=dtype),
    )
    compare(torch.arange(length, device="npu"), torch.arange(length))


@pytest.mark.filterwarnings("ignore:torch.range is deprecated")
@given(start=st.integers(-5, 5), length=st.integers(1, 40), step=st.sampled_from((1, 0.5)))
def test_range_includes_its_end(start: int, length: int, step: float) -> None:
    end = start + length * step
    compare(torch.range(start, end, step, device="npu"), torch.range(start, end, step))


@given(
    start=st.floats(-5, 5, width=16),
    end=st.floats(-5, 5, width=16),
    steps=st.integers(0, 70),
    dtype=st.sampled_from(FLOATS),
)
def test_linspace_equals_torch(start: float, end: float, steps: int, dtype: torch.dtype) -> None:
    compare(
        torch.linspace(start, end, steps, dtype=dtype, device="npu"),
        torch.linspace(start, end, steps, dtype=dtype),
        rtol=1e-6,
    )


def test_a_range_of_another_length_than_the_output_is_refused() -> None:
    with pytest.raises(
        RuntimeError, match="the range has 10 elements but the output has room for 9"
    ):
        call("Arange", Number(0), Number(10), Number(1), torch.empty(9, device="npu"))
