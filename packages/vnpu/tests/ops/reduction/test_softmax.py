"""Softmax and log softmax equal torch's on the CPU."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_davinci_testing.operators.comparison import compare
from vllm_davinci_testing.operators.strategies import FLOATS, Pair, tensors, values


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@given(x=tensors(FLOATS, special=True), dim=st.integers(-1, 2))
def test_equals_torch_along_every_dimension(name: str, x: Pair, dim: int) -> None:
    f = getattr(torch, name)
    dim = min(dim, max(x.cpu.dim() - 1, 0))
    compare(f(x.npu, dim), f(x.cpu, dim), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@given(x=tensors(FLOATS))
def test_result_may_have_a_wider_dtype(name: str, x: Pair) -> None:
    f = getattr(torch, name)
    compare(f(x.npu, -1, dtype=torch.float32), f(x.cpu, -1, dtype=torch.float32), rtol=1e-6)


def test_row_of_minus_infinity_is_nan_as_on_the_cpu() -> None:
    x = torch.full((2, 5), float("-inf"))
    x[1, 2] = 0.0
    compare(x.npu().softmax(-1), x.softmax(-1))


def test_vocabulary_sized_rows_equal_torch() -> None:
    x = values((3, 32003), torch.bfloat16, 1)
    compare(x.npu().softmax(-1), x.softmax(-1), rtol=1e-2)
