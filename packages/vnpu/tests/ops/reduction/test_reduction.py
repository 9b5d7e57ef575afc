"""Reductions and scans equal torch's on the CPU."""

import pytest
import torch
from hypothesis import given

from vllm_davinci_testing.operators.aclnn import call
from vllm_davinci_testing.operators.comparison import compare
from vllm_davinci_testing.operators.strategies import FLOATS, Pair, tensors


@given(x=tensors((torch.float16, torch.bfloat16), shapes=((4096,), (3, 4096)), low=0, high=1))
def test_sixteen_bit_floats_accumulate_in_fp32(x: Pair) -> None:
    exact = x.cpu.double().sum(-1)
    torch.testing.assert_close(x.npu.sum(-1).cpu().double(), exact, rtol=4e-3, atol=0)


@given(x=tensors((torch.float16, torch.bfloat16), shapes=((15, 64),), low=1, high=2))
def test_products_of_sixteen_bit_floats_are_rounded_once(x: Pair) -> None:
    dtype = x.cpu.dtype
    exact = x.cpu.double().prod(0)
    rounding = {"rtol": 0.51 * torch.finfo(dtype).eps, "atol": 0}
    torch.testing.assert_close(x.npu.prod(0).cpu().double(), exact, **rounding)
    row = x.npu[:, 0].prod().cpu().double()
    torch.testing.assert_close(row, exact[0], **rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [1, 31, 64, 700, 4096])
def test_argmax_of_long_rows_is_the_first_of_the_greatest(dtype: torch.dtype, columns: int) -> None:
    rows = torch.randn(40, columns, generator=torch.Generator().manual_seed(columns)).to(dtype)
    rows[0] = -torch.inf
    rows[1] = -0.0
    rows[1, columns // 2] = 0.0
    compare(rows.npu().argmax(-1), rows.argmax(-1))
    rows[2, -1] = torch.nan
    compare(rows.npu().argmax(-1, keepdim=True), rows.argmax(-1, keepdim=True))


def tuple_of(result: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


@given(x=tensors(FLOATS, shapes=((7,), (3, 5), (2, 3, 67)), special=True))
def test_aminmax_along_a_dim_and_of_all_equals_torch(x: Pair) -> None:
    low, high = x.npu.new_empty(x.cpu.shape[:-1]), x.npu.new_empty(x.cpu.shape[:-1])
    call("AminmaxDim", x.npu, -1, False, low, high)
    compare((low, high), tuple_of(torch.aminmax(x.cpu, dim=-1)))
    low, high = x.npu.new_empty(()), x.npu.new_empty(())
    call("AminmaxAll", x.npu, low, high)
    compare((low, high), tuple_of(torch.aminmax(x.cpu)))


@pytest.mark.parametrize("name", ["ArgMax", "ArgMin"])
def test_positions_of_extremes_may_be_int32(name: str) -> None:
    x, out = torch.tensor([[3, 3], [2, 3], [4, 2], [6, 7]]), torch.zeros(2, dtype=torch.int32).npu()
    call(name, x.npu(), 0, False, out)
    compare(out, getattr(torch, name.lower())(x, 0).int())
