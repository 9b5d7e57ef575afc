"""Comparisons, logic and bits equal torch's on the CPU."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_davinci_testing.operators.comparison import compare, compare_calls
from vllm_davinci_testing.operators.strategies import (
    ALL,
    FLOATS,
    INTEGERS,
    NUMBERS,
    Pair,
    operands,
    tensors,
)

Binary = Callable[..., torch.Tensor]
COMPARISONS = ["eq", "ne", "lt", "le", "gt", "ge"]
BITS = ["bitwise_and", "bitwise_or", "bitwise_xor"]


@pytest.mark.parametrize("name", COMPARISONS)
@given(
    pair=operands(ALL, low=-2, high=3, special=True), scalar=st.sampled_from((0, 1, -1, 0.5, True))
)
def test_comparison_equals_torch(name: str, pair: tuple[Pair, Pair], scalar: float) -> None:
    f: Binary = getattr(torch, name)
    x, _ = pair
    compare_calls(name, *pair)
    compare(f(x.npu, scalar), f(x.cpu, scalar))


@pytest.mark.parametrize("name", COMPARISONS)
@given(x=tensors(NUMBERS, low=-2, high=3, special=True), scalar=st.sampled_from((0, 1, -1)))
def test_in_place_comparison_writes_the_own_dtype(name: str, x: Pair, scalar: int) -> None:
    npu, cpu = x.npu.clone(), x.cpu.clone()
    compare(getattr(npu, name + "_")(scalar), getattr(cpu, name + "_")(scalar))
    npu, cpu = x.npu.clone(), x.cpu.clone()
    compare(getattr(npu, name + "_")(x.npu * 2), getattr(cpu, name + "_")(x.cpu * 2))


@pytest.mark.parametrize("name", ["logical_and", "logical_or", "logical_xor"])
@given(pair=operands(ALL, low=-1, high=2, special=True))
def test_logic_equals_torch(name: str, pair: tuple[Pair, Pair]) -> None:
    x, y = pair
    compare_calls(name, *pair)
    if name != "logical_xor":
        npu, cpu = torch.logical_xor(x.npu, y.npu), torch.logical_xor(x.cpu, y.cpu)
        compare(getattr(npu, name + "_")(y.npu), getattr(cpu, name + "_")(y.cpu))


@given(x=tensors(ALL, low=-1, high=2, special=True))
def test_negation_equals_torch(x: Pair) -> None:
    compare(torch.logical_not(x.npu), torch.logical_not(x.cpu))
    compare(x.npu.clone().logical_not_(), x.cpu.clone().logical_not_())


@pytest.mark.parametrize("name", BITS)
@given(pair=operands((*INTEGERS, torch.bool), low=-100, high=100), scalar=st.sampled_from((1, 6)))
def test_bits_of_two_tensors_equal_torch(name: str, pair: tuple[Pair, Pair], scalar: int) -> None:
    f: Binary = getattr(torch, name)
    x, y = pair
    compare_calls(name, *pair)
    number = bool(scalar) if x.base.dtype == torch.bool else scalar
    compare(f(x.npu, number), f(x.cpu, number))
    npu, cpu = f(x.npu, y.npu), f(x.cpu, y.cpu)
    compare(getattr(npu, name + "_")(y.npu), getattr(cpu, name + "_")(y.cpu))
    compare(getattr(npu, name + "_")(number), getattr(cpu, name + "_")(number))


@given(x=tensors((*INTEGERS, torch.bool), low=-100, high=100))
def test_bitwise_not_equals_torch(x: Pair) -> None:
    compare(~x.npu, ~x.cpu)


@given(x=tensors((torch.int32, torch.int64), low=-1000, high=1000), by=st.integers(0, 5))
def test_shifts_equal_torch(x: Pair, by: int) -> None:
    compare(x.npu << by, x.cpu << by)
    compare(x.npu >> by, x.cpu >> by)
    shift_npu, shift_cpu = x.npu.abs() % 7, x.cpu.abs() % 7
    compare(x.npu << shift_npu, x.cpu << shift_cpu)
    compare(x.npu >> shift_npu, x.cpu >> shift_cpu)
    compare(torch.bitwise_left_shift(x.npu, shift_npu), torch.bitwise_left_shift(x.cpu, shift_cpu))
    compare(
        torch.bitwise_right_shift(x.npu, shift_npu), torch.bitwise_right_shift(x.cpu, shift_cpu)
    )


@given(pair=operands(ALL, low=0, high=2))
def test_equal_answers_for_the_whole_tensors(pair: tuple[Pair, Pair]) -> None:
    x, y = pair
    assert torch.equal(x.npu, x.npu.clone())
    if x.cpu.shape == y.cpu.shape:
        assert torch.equal(x.npu, y.npu) == torch.equal(x.cpu, y.cpu)


@given(
    pair=operands(FLOATS, special=True),
    rtol=st.sampled_from((0.0, 0.1, 1.0)),
    equal_nan=st.booleans(),
)
def test_isclose_equals_torch(pair: tuple[Pair, Pair], rtol: float, equal_nan: bool) -> None:
    x, y = pair
    compare(
        torch.isclose(x.npu, y.npu, rtol=rtol, atol=0.25, equal_nan=equal_nan),
        torch.isclose(x.cpu, y.cpu, rtol=rtol, atol=0.25, equal_nan=equal_nan),
    )
