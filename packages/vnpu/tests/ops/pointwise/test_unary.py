"""Element-wise functions of one tensor equal torch's on the CPU."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import torch_npu
from hypothesis import given
from hypothesis import strategies as st

from vllm_davinci_testing.operators.aclnn import call
from vllm_davinci_testing.operators.comparison import compare
from vllm_davinci_testing.operators.strategies import FLOATS, NUMBERS, Pair, tensors

Unary = Callable[[torch.Tensor], torch.Tensor]

MATHEMATICS = [
    *("abs", "neg", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p"),
    *("sqrt", "rsqrt", "reciprocal", "sin", "cos", "tan", "erf", "erfc", "erfinv"),
    *("acos", "asin", "atan", "acosh", "asinh", "atanh", "cosh", "sinh"),
]
ROUNDING = ["floor", "ceil", "round", "trunc", "sign"]
TESTS = ["isfinite", "isinf", "isnan", "isneginf", "isposinf"]
IN_PLACE = [
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal"),
    *("acos", "asin", "atan", "acosh", "asinh", "atanh", "cosh", "sinh", "tan"),
    *("erfc", "erfinv"),
    *("sin", "cos", "erf", "floor", "ceil", "sigmoid", "tanh", "relu", "neg", "abs", "trunc"),
]
ACTIVATIONS: dict[str, Unary] = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": F.silu,
    "mish": F.mish,
    "relu": F.relu,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 1.5),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "elu": lambda x: F.elu(x, 1.5),
    "threshold": lambda x: F.threshold(x, 0.3, -2.0),
    "softplus": lambda x: F.softplus(x, beta=2.0, threshold=3.0),
    "logsigmoid": F.logsigmoid,
    "silu_in_place": lambda x: F.silu(x.clone(), inplace=True),
    "mish_in_place": lambda x: F.mish(x.clone(), inplace=True),
    "hardswish_in_place": lambda x: F.hardswish(x.clone(), inplace=True),
    "hardsigmoid_in_place": lambda x: F.hardsigmoid(x.clone(), inplace=True),
    "relu_in_place": lambda x: F.relu(x.clone(), inplace=True),
}
# Vectorised and scalar paths of one kernel differ in the last bit.
LAST_BIT = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("name", MATHEMATICS + ROUNDING)
@given(x=tensors(FLOATS, special=True))
def test_function_equals_torch(name: str, x: Pair) -> None:
    f: Unary = getattr(torch, name)
    compare(f(x.npu), f(x.cpu), rtol=LAST_BIT[x.base.dtype])


@pytest.mark.parametrize("name", ["sqrt", "sin", "sigmoid", "abs", "neg", "sign"])
@given(x=tensors((torch.int32, torch.int64), low=-3, high=9))
def test_function_of_integers_equals_torch(name: str, x: Pair) -> None:
    f: Unary = getattr(torch, name)
    compare(f(x.npu), f(x.cpu), rtol=1e-6)


@pytest.mark.parametrize("name", TESTS)
@given(x=tensors(NUMBERS, special=True))
def test_special_values_are_recognised(name: str, x: Pair) -> None:
    f: Unary = getattr(torch, name)
    compare(f(x.npu), f(x.cpu))


@pytest.mark.parametrize("name", IN_PLACE)
@given(x=tensors(FLOATS, special=True))
def test_in_place_form_equals_torch(name: str, x: Pair) -> None:
    npu, cpu = x.npu.clone(), x.cpu.clone()
    result = getattr(npu, name + "_")()
    assert result is npu
    compare(npu, getattr(cpu, name + "_")(), rtol=LAST_BIT[x.base.dtype])


@given(x=tensors((torch.float32, torch.float16)), decimals=st.sampled_from((-1, 1, 2)))
def test_rounding_to_decimals_equals_torch(x: Pair, decimals: int) -> None:
    compare(torch.round(x.npu, decimals=decimals), torch.round(x.cpu, decimals=decimals))


@given(
    x=tensors(FLOATS, special=True),
    nan=st.sampled_from((None, 0.5)),
    bound=st.sampled_from((None, 100.0)),
)
def test_nan_to_num_equals_torch(x: Pair, nan: float | None, bound: float | None) -> None:
    compare(torch.nan_to_num(x.npu, nan, bound, bound), torch.nan_to_num(x.cpu, nan, bound, bound))
    npu, cpu = x.npu.clone(), x.cpu.clone()
    compare(npu.nan_to_num_(nan, bound, bound), cpu.nan_to_num_(nan, bound, bound))


@pytest.mark.parametrize("name", ACTIVATIONS)
@given(x=tensors(FLOATS, special=True))
def test_activation_equals_torch(name: str, x: Pair) -> None:
    f = ACTIVATIONS[name]
    compare(f(x.npu), f(x.cpu), rtol=LAST_BIT[x.base.dtype], atol=1e-7)


@given(x=tensors(FLOATS, shapes=((6,), (3, 8), (4, 5, 2), (2, 0, 4)), special=True))
def test_glu_equals_torch(x: Pair) -> None:
    compare(F.glu(x.npu), F.glu(x.cpu), rtol=LAST_BIT[x.base.dtype])
    if x.cpu.dim() == 3 and x.cpu.size(0) % 2 == 0:
        compare(F.glu(x.npu, 0), F.glu(x.cpu, 0), rtol=LAST_BIT[x.base.dtype])


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@given(x=tensors(FLOATS, special=True))
def test_npu_gelu_computes_the_form_asked_for(approximate: str, x: Pair) -> None:
    npu = torch_npu.npu_gelu(x.npu, approximate=approximate)
    compare(npu, F.gelu(x.cpu, approximate=approximate), rtol=LAST_BIT[x.base.dtype], atol=1e-7)


@given(x=tensors(FLOATS, special=True))
def test_gelu_is_the_tanh_form_without_compatible_implementations(x: Pair) -> None:
    npu = F.gelu(x.npu)
    compare(npu, F.gelu(x.cpu, approximate="tanh"), rtol=LAST_BIT[x.base.dtype], atol=1e-7)


@given(x=tensors(FLOATS, special=True))
def test_log_sigmoid_without_buffer_equals_torch(x: Pair) -> None:
    npu = x.npu.contiguous()
    out = torch.empty_like(npu)
    call("LogSigmoid", npu, out)
    compare(out, F.logsigmoid(x.cpu), rtol=LAST_BIT[x.base.dtype], atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_sign_of_a_complex_number_is_its_direction(dtype: torch.dtype) -> None:
    x = torch.tensor([3 + 4j, 0, -2j, -5], dtype=dtype)
    compare(torch.sgn(x.npu()), torch.sgn(x), rtol=1e-6)
