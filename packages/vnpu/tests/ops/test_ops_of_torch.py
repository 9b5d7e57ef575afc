"""torch's functions give the CPU's results on the device, for the inputs of torch's own tests.

torch's table of functions has inputs for every overload: empty and broadcast sizes, strides,
special values. The test compares results, in-place results, and the arguments after the call. It
omits inputs that the device refuses with a status, if the device computes other inputs.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch

from vllm_davinci_testing.operators.comparison import compare

pytestmark = pytest.mark.refused_calls
FUNCTIONS = """
abs neg exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan erf erfc erfinv acos
asin atan acosh asinh atanh cosh sinh floor ceil round trunc sign sgn isfinite isinf isnan isneginf
isposinf nan_to_num sigmoid tanh
add sub mul div true_divide floor_divide remainder fmod rsub pow atan2 logaddexp maximum minimum
__radd__ __rmul__ __rdiv__ __rmod__ __rpow__ addcmul addcdiv lerp clamp clamp_min clamp_max
eq ne lt le gt ge equal isclose logical_and logical_or logical_xor logical_not bitwise_and
bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift
cat stack split split_with_sizes repeat tile repeat_interleave flip roll triu tril clone contiguous
fill full_like zeros_like ones_like eye
__getitem__ index_put index_select index_add index_copy index_fill gather take put scatter
scatter_add masked_fill masked_scatter masked_select where
sort argsort msort topk kthvalue unique unique_consecutive searchsorted bucketize nonzero isin
sum mean prod logsumexp max min argmax argmin amax amin aminmax all any cumsum cumprod cummax cummin
var std var_mean std_mean norm linalg.vector_norm median histc bincount softmax log_softmax
mm addmm bmm matmul mv addmv dot baddbmm addbmm
""".split()  # noqa: SIM905
OF_LAYERS = """
silu mish relu hardswish hardsigmoid hardtanh leaky_relu elu threshold softplus logsigmoid glu
layer_norm group_norm batch_norm embedding one_hot pad unfold linear conv1d conv2d conv3d
conv_transpose1d conv_transpose2d conv_transpose3d grid_sample avg_pool2d adaptive_avg_pool2d
interpolate
""".split()  # noqa: SIM905
NAMES = [*FUNCTIONS, *(f"nn.functional.{name}" for name in OF_LAYERS)]
# Sums run in another order, and a kernel's vectorized and scalar paths differ in the last bit.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# 16-bit sums: torch rounds after each part, the device once.
ROUNDED = ("addbmm", "conv_transpose2d", "conv_transpose3d", "grid_sample")
FLOATS_ALONE = re.compile(r"^exp$|mm$|matmul|mv$|linear$|conv")
# CANN rounds float16 between multiplying and adding, which `test_elementwise` compares; it refuses
# the last case.
LEFT_OUT = [
    *(("addcmul", torch.float16), ("addcdiv", torch.float16)),
    ("nn.functional.grid_sample", torch.bfloat16),
]
# Reductions; their inputs in torch's table have no NaN and no infinity.
SPECIAL = """
max min argmax argmin amax amin aminmax logsumexp cummax cummin softmax log_softmax sum all any
where
""".split()  # noqa: SIM905
MOST_SAMPLES = 8  # per function and dtype, spread over all inputs
REFUSAL = re.compile(r"error code is (161002|561002|207000)")


@cache
def table() -> dict[str, list[Any]]:
    from torch.testing._internal.common_methods_invocations import op_db  # takes seconds

    found: dict[str, list[Any]] = {}
    for function in op_db:
        found.setdefault(function.name, []).append(function)
    return found


def samples(function: Any, dtype: torch.dtype) -> Iterator[Any]:
    from torch.testing._internal.opinfo import core  # takes seconds

    found = [each for each in function.sample_inputs("cpu", dtype) if is_defined(function, each)]
    for kind, special in (
        (core.UnaryUfuncInfo, core.generate_elementwise_unary_extremal_value_tensors),
        (core.BinaryUfuncInfo, core.generate_elementwise_binary_extremal_value_tensors),
    ):
        if dtype.is_floating_point and isinstance(function, kind):
            found += special(function, device="cpu", dtype=dtype)
    if getattr(function, "supports_rhs_python_scalar", False):
        scalars = core.generate_elementwise_binary_with_scalar_samples
        found += filter(partial(is_defined, function), scalars(function, device="cpu", dtype=dtype))
    for sample in found[:: 1 + len(found) // MOST_SAMPLES]:
        yield sample
        yield sample.noncontiguous()
        if function.name in SPECIAL and dtype.is_floating_point:
            yield sample.transform(sprinkled)


def sprinkled(value: Any) -> Any:
    """Replaces some entries of a float tensor by infinities and NaN."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    place = torch.arange(value.numel()).view(value.shape) % 11
    for at, special in ((1, torch.nan), (4, torch.inf), (7, -torch.inf)):
        value = value.masked_fill(place == at, special)
    return value


def is_defined(function: Any, sample: Any) -> bool:
    """False for results that only the CPU defines, and for numbers instead of tensors."""
    if isinstance(sample.input, (bool, int, float)) and "device" not in sample.kwargs:
        return False
    if function.name in ("sort", "argsort"):
        return bool(sample.kwargs.get("stable"))
    if function.variant_test_name == "area" and sample.input.dim() == 5:
        return False  # torch_npu averages volumes only over the whole volume
    # CANN's operator has sizes, but no factors
    return not (function.variant_test_name == "nearest" and sample.kwargs.get("scale_factor"))


def outcome(call: Callable[..., Any], sample: Any) -> tuple[Any, list[torch.Tensor]]:
    """Returns the result, and the arguments after the call."""
    torch.manual_seed(0)
    result = call(sample.input, *sample.args, **sample.kwargs)
    held = [sample.input, *sample.args, *sample.kwargs.values()]
    return result, [each for each in held if isinstance(each, torch.Tensor)]


def calls_of(function: Any, sample: Any) -> list[Callable[..., Any]]:
    """Returns the function, and its in-place form if all operands have the input's sizes."""
    operands = [each for each in sample.args if isinstance(each, torch.Tensor)]
    is_plain = isinstance(sample.input, torch.Tensor) and all(
        each.shape == sample.input.shape for each in operands
    )
    in_place = function.get_inplace()
    return [function.op, in_place] if is_plain and in_place else [function.op]


def on_npu(sample: Any) -> Any:
    moved = sample.transform(lambda each: each.npu() if isinstance(each, torch.Tensor) else each)
    if "device" in moved.kwargs:
        moved.kwargs["device"] = "npu"
    return moved


def on_cpu(sample: Any, is_widened: bool) -> Any:
    def copied(each: Any) -> Any:
        if not isinstance(each, torch.Tensor):
            return each
        return each.float() if is_widened and each.is_floating_point() else each.clone()

    return sample.transform(copied)


def differs(call: Callable[..., Any], sample: Any, name: str, dtype: torch.dtype) -> bool | None:
    """Returns False if both devices give the same result, None if one of them cannot compute it."""
    tolerance = TOLERANCE.get(dtype, 0.0)
    is_widened = name.endswith(ROUNDED) and dtype in (torch.float16, torch.bfloat16)
    try:
        expected = outcome(call, on_cpu(sample, is_widened))
    except RuntimeError:
        return None
    try:
        found = outcome(call, on_npu(sample))
        torch.npu.synchronize()
    except RuntimeError as error:
        if REFUSAL.search(str(error)):
            return None
        raise
    if is_widened:
        found, expected = found[:1], (expected[0].to(dtype),)
    compare(found, expected, rtol=tolerance, atol=tolerance)
    return False


@pytest.mark.filterwarnings("ignore")  # for deprecated overloads
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.int64),
        pytest.param(
            (torch.float16, torch.bfloat16, torch.int32, torch.bool),
            marks=pytest.mark.nightly("operators"),
        ),
    ],
    ids=["daily", "others"],
)
def test_a_function_equals_that_of_the_cpu(name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    computed: Counter[torch.dtype] = Counter()
    for function in table()[name]:
        for dtype in dtypes:
            is_known = dtype.is_floating_point or not FLOATS_ALONE.search(name)
            if (name, dtype) in LEFT_OUT or not (
                is_known and function.supports_dtype(dtype, "cpu")
            ):
                continue
            computed[dtype] += 0
            for sample in samples(function, dtype):
                for call in calls_of(function, sample):
                    computed[dtype] += differs(call, sample, name, dtype) is False
    assert 0 not in computed.values(), computed
