"""Element-wise arithmetic of two or three operands equals torch's on the CPU."""

import ctypes
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_davinci_testing.operators.aclnn import Number, call
from vllm_davinci_testing.operators.comparison import compare
from vllm_davinci_testing.operators.strategies import FLOATS, NUMBERS, operands, tensors

Binary = Callable[..., torch.Tensor]


@pytest.mark.parametrize(("f", "combine"), [(torch.addcmul, torch.mul), (torch.addcdiv, torch.div)])
@given(pair=operands((torch.float16,), low=0.25), value=st.sampled_from((1, -0.3)))
def test_fused_products_of_float16_are_rounded_after_each_step(f, combine, pair, value):
    x, y = pair
    factor = torch.tensor(value, dtype=torch.float16)
    expected = y.cpu + combine(x.cpu, y.cpu) * factor
    compare(f(y.npu, x.npu, y.npu, value=value), expected)
    npu = x.npu + y.npu
    getattr(npu, f"{f.__name__}_")(x.npu, y.npu, value=value)
    compare(npu, x.cpu + y.cpu + combine(x.cpu, y.cpu) * factor)


@given(x=tensors(NUMBERS), y=tensors(NUMBERS, shapes=((),)))
def test_mixed_dtypes_promote_as_torch_does(x, y) -> None:
    compare(x.npu + y.npu, x.cpu + y.cpu)
    compare(x.npu * y.npu, x.cpu * y.cpu)
    # A 0-d CPU tensor acts as a number.
    compare(x.npu * y.cpu, x.cpu * y.cpu)


@given(x=tensors(FLOATS))
def test_scalar_plus_scaled_tensor_equals_torch(x) -> None:
    npu = x.npu.contiguous()
    out = torch.empty_like(npu)
    call("AddV3", Number(2.5), npu, Number(0.5), out)
    compare(out, torch.add(torch.tensor(2.5), x.cpu, alpha=0.5).to(x.cpu.dtype))


def test_input_may_be_the_output() -> None:
    x = torch.arange(24.0, device="npu").reshape(4, 6)
    torch.add(x, x, out=x)
    compare(x, torch.arange(24.0).reshape(4, 6) * 2)
    x.mul_(x.t().reshape(4, 6))
    expected = torch.arange(24.0).reshape(4, 6) * 2
    compare(x, expected * expected.t().reshape(4, 6))


def test_an_unknown_rounding_mode_is_refused() -> None:
    x = torch.ones(3, device="npu")
    with pytest.raises(RuntimeError, match="mode is 7; it must be 0"):
        call("DivMod", x, x, ctypes.c_int32(7), torch.empty_like(x))


@pytest.mark.parametrize("f", [torch.remainder, torch.fmod])
def test_remainders_of_integers_divided_by_zero_are_zero(f: Binary) -> None:
    x, y = torch.tensor([7, -3, 5, 6]), torch.tensor([2, 0, 0, 4])
    compare(f(x.npu(), y.npu()), torch.tensor([1, 0, 0, 2]))
    if f is torch.remainder:
        compare(x.npu().remainder_(y.npu()), torch.tensor([1, 0, 0, 2]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_integers_divided_in_place_stay_integers(dtype: torch.dtype) -> None:
    """A mean over ranks divides integers in place."""
    compare(
        torch.tensor([8, 7, 0], dtype=dtype).npu().div_(2), torch.tensor([4, 3, 0], dtype=dtype)
    )
