"""Element-wise arithmetic of two or three operands equals torch's on the CPU."""

import ctypes
import operator
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_davinci_testing.operators.aclnn import Number, call
from vllm_davinci_testing.operators.comparison import compare, compare_calls
from vllm_davinci_testing.operators.strategies import FLOATS, INTEGERS, NUMBERS, operands, tensors

Binary = Callable[..., torch.Tensor]
SCALARS = (2, -3, 0.5, 1.75)

ARITHMETIC = ["add", "sub", "mul", "maximum", "minimum"]
OPERATORS = [
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod),
    torch.fmod,
]
DIVISION = ["div", "floor_divide", "remainder", "fmod"]


@pytest.mark.parametrize("name", ARITHMETIC)
@given(pair=operands(NUMBERS, special=True))
def test_tensor_with_tensor_equals_torch(name: str, pair) -> None:
    compare_calls(name, *pair)


@pytest.mark.parametrize("name", DIVISION)
@given(pair=operands(FLOATS, special=True))
def test_division_of_floats_equals_torch(name: str, pair) -> None:
    compare_calls(name, *pair)


@pytest.mark.parametrize("name", DIVISION)
@given(pair=operands(INTEGERS, low=1, high=60))
def test_division_of_integers_equals_torch(name: str, pair) -> None:
    f: Binary = getattr(torch, name)
    x, y = pair
    compare(f(-x.npu, y.npu), f(-x.cpu, y.cpu))


@pytest.mark.parametrize("rounding_mode", [None, "trunc", "floor"])
@given(pair=operands(FLOATS, special=True), scalar=st.sampled_from(SCALARS))
def test_division_rounds_as_asked(rounding_mode, pair, scalar):
    x, y = pair
    compare(
        torch.div(x.npu, y.npu, rounding_mode=rounding_mode),
        torch.div(x.cpu, y.cpu, rounding_mode=rounding_mode),
    )
    compare(
        torch.div(x.npu, scalar, rounding_mode=rounding_mode),
        torch.div(x.cpu, scalar, rounding_mode=rounding_mode),
    )
    npu, cpu = x.npu.clone(), x.cpu.clone()
    compare(
        npu.div_(scalar, rounding_mode=rounding_mode), cpu.div_(scalar, rounding_mode=rounding_mode)
    )
    wide_npu, wide_cpu = torch.zeros(2, 3, 5, device="npu"), torch.zeros(2, 3, 5)
    compare(
        wide_npu.add_(7).div_(wide_npu * 2, rounding_mode=rounding_mode),
        wide_cpu.add_(7).div_(wide_cpu * 2, rounding_mode=rounding_mode),
    )


@pytest.mark.parametrize("f", [*OPERATORS, torch.rsub])
@given(x=tensors(FLOATS, special=True), scalar=st.sampled_from(SCALARS))
def test_float_tensor_with_scalar_equals_torch(f: Binary, x, scalar: float) -> None:
    compare(f(x.npu, scalar), f(x.cpu, scalar))


@pytest.mark.parametrize("f", OPERATORS)
@given(x=tensors((torch.int32, torch.int64)), scalar=st.sampled_from((2, -3, 5)))
def test_integer_tensor_with_scalar_equals_torch(f: Binary, x, scalar: int) -> None:
    compare(f(x.npu, scalar), f(x.cpu, scalar))


@pytest.mark.parametrize(
    "f", [operator.add, operator.sub, operator.mul, operator.truediv, operator.mod, operator.pow]
)
@given(x=tensors(FLOATS, low=0.5), scalar=st.sampled_from(SCALARS))
def test_scalar_with_tensor_equals_torch(f: Binary, x, scalar: float) -> None:
    compare(f(scalar, x.npu), f(scalar, x.cpu), rtol=1e-6)


@pytest.mark.parametrize(
    "f",
    [
        operator.iadd,
        operator.isub,
        operator.imul,
        operator.itruediv,
        operator.ifloordiv,
        operator.imod,
    ],
)
@given(pair=operands(FLOATS, low=0.25), scalar=st.sampled_from(SCALARS))
def test_in_place_forms_equal_torch(f: Binary, pair, scalar: float) -> None:
    x, y = pair
    npu, cpu = (x.npu + y.npu).clone(), (x.cpu + y.cpu).clone()
    compare(f(npu, y.npu), f(cpu, y.cpu), rtol=1e-6)
    compare(f(npu, scalar), f(cpu, scalar), rtol=1e-6)


@given(pair=operands(FLOATS), alpha=st.sampled_from((2, -1, 0.5)))
def test_alpha_scales_the_second_operand(pair, alpha: float) -> None:
    x, y = pair
    compare(torch.add(x.npu, y.npu, alpha=alpha), torch.add(x.cpu, y.cpu, alpha=alpha))
    compare(torch.sub(x.npu, y.npu, alpha=alpha), torch.sub(x.cpu, y.cpu, alpha=alpha))
    compare(torch.rsub(x.npu, y.npu, alpha=alpha), torch.rsub(x.cpu, y.cpu, alpha=alpha))
    compare(torch.add(x.npu, 3, alpha=alpha), torch.add(x.cpu, 3, alpha=alpha))
    compare(torch.rsub(x.npu, 3, alpha=alpha), torch.rsub(x.cpu, 3, alpha=alpha))


@given(pair=operands(FLOATS, low=0.25, high=3), scalar=st.sampled_from((2, 3, 0.5, -1.5)))
def test_powers_equal_torch(pair, scalar: float) -> None:
    x, y = pair
    compare(x.npu**y.npu, x.cpu**y.cpu, rtol=1e-6)
    compare(x.npu**scalar, x.cpu**scalar, rtol=1e-6)
    compare(x.npu.clone().pow_(scalar), x.cpu.clone().pow_(scalar), rtol=1e-6)
    wide_npu, wide_cpu = x.npu + y.npu, x.cpu + y.cpu
    compare(wide_npu.pow_(y.npu), wide_cpu.pow_(y.cpu), rtol=1e-6)


@given(pair=operands(FLOATS, special=True))
def test_atan2_equals_torch(pair) -> None:
    x, y = pair
    compare(torch.atan2(x.npu, y.npu), torch.atan2(x.cpu, y.cpu), rtol=1e-6)


@given(pair=operands(FLOATS, special=True))
def test_logaddexp_equals_torch(pair) -> None:
    x, y = pair
    compare(torch.logaddexp(x.npu, y.npu), torch.logaddexp(x.cpu, y.cpu), rtol=1e-6)


@pytest.mark.parametrize("f", [torch.addcmul, torch.addcdiv])
@given(pair=operands((torch.float32, torch.bfloat16), low=0.25), value=st.sampled_from((1, -0.5)))
def test_fused_products_equal_torch(f: Binary, pair, value: float) -> None:
    x, y = pair
    compare(f(y.npu, x.npu, y.npu, value=value), f(y.cpu, x.cpu, y.cpu, value=value), rtol=1e-6)
    in_place = torch.Tensor.addcmul_ if f is torch.addcmul else torch.Tensor.addcdiv_
    npu, cpu = x.npu + y.npu, x.cpu + y.cpu
    compare(
        in_place(npu, x.npu, y.npu, value=value),
        in_place(cpu, x.cpu, y.cpu, value=value),
        rtol=1e-6,
    )


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


@given(pair=operands(FLOATS), weight=st.sampled_from((0.0, 0.25, 0.75, 2.0)))
def test_lerp_equals_torch(pair, weight: float) -> None:
    x, y = pair
    compare(torch.lerp(x.npu, y.npu, weight), torch.lerp(x.cpu, y.cpu, weight), rtol=1e-6)
    compare(torch.lerp(x.npu, y.npu, x.npu), torch.lerp(x.cpu, y.cpu, x.cpu), rtol=1e-6)


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
    """The layout after a mean over ranks."""
    compare(
        torch.tensor([8, 7, 0], dtype=dtype).npu().div_(2), torch.tensor([4, 3, 0], dtype=dtype)
    )
