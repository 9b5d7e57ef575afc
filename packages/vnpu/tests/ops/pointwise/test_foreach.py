"""Operations on lists of tensors, of which each is torch's on the CPU."""

from collections.abc import Callable, Sequence

import pytest
import torch

from vllm_davinci_testing.operators.aclnn import Number, call
from vllm_davinci_testing.operators.comparison import compare
from vllm_davinci_testing.operators.strategies import values

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
NUMBERS = (*FLOATS, torch.int32)
SIZES = ((7,), (3, 5), (2, 3, 67), ())
Lists = Sequence[torch.Tensor]


def lists(dtype: torch.dtype, count: int, low: float = 0.25) -> list[list[torch.Tensor]]:
    """`count` lists on the CPU, with tensors of the same sizes."""
    return [
        [
            values(sizes, dtype, 10 * i + j, low=max(low, 1) if dtype == torch.int32 else low)
            for j, sizes in enumerate(SIZES)
        ]
        for i in range(count)
    ]


def on_device(tensors: Lists) -> list[torch.Tensor]:
    return [tensor.npu() for tensor in tensors]


def compare_both(
    name: str,
    on_cpu: Sequence[Lists],
    arguments: tuple[object, ...],
    expected: Lists,
    rtol: float = 0.0,
) -> None:
    """torch._foreach_`name` and its form in place."""
    compare(
        getattr(torch, f"_foreach_{name}")(*map(on_device, on_cpu), *arguments),
        list(expected),
        rtol=rtol,
    )
    devices = [on_device(each) for each in on_cpu]
    getattr(torch, f"_foreach_{name}_")(*devices, *arguments)
    compare(devices[0], list(expected), rtol=rtol)


def half(value: float, dtype: torch.dtype) -> float:
    """A number as it reaches a list: in float16 beside float16."""
    return torch.tensor(value, dtype=dtype).item() if dtype == torch.float16 else value


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "name",
    [
        *("abs", "atan", "cos", "cosh", "erf", "erfc", "exp", "expm1", "log", "log10", "log1p"),
        *("log2", "neg", "reciprocal", "sigmoid", "sign", "sin", "sinh", "sqrt", "tan", "tanh"),
        *("floor", "ceil", "round", "trunc", "frac"),
    ],
)
def test_a_function_of_each_tensor(name: str, dtype: torch.dtype) -> None:
    (x,) = lists(dtype, 1)
    compare_both(name, [x], (), [getattr(torch, name)(each) for each in x], rtol=1e-6)


@pytest.mark.parametrize("name", ["asin", "acos"])
def test_functions_within_one(name: str) -> None:
    (x,) = lists(torch.float32, 1)
    x = [each / 4 for each in x]
    compare_both(name, [x], (), [getattr(torch, name)(each) for each in x], rtol=1e-6)


def test_lists_become_zero_and_are_copied() -> None:
    x, y = map(on_device, lists(torch.float32, 2))
    torch._foreach_copy_(x, y)
    compare(x, [each.cpu() for each in y])
    torch._foreach_zero_(x)
    compare(x, [torch.zeros(sizes) for sizes in SIZES])


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("dtype", FLOATS)
def test_norms_of_each_tensor(order: int, dtype: torch.dtype) -> None:
    (x,) = lists(dtype, 1)
    expected = [torch.linalg.vector_norm(each.float(), order).to(dtype) for each in x]
    compare(list(torch._foreach_norm(on_device(x), order)), expected, rtol=1e-6)


ARITHMETIC: tuple[tuple[str, Callable[..., torch.Tensor]], ...] = (
    ("add", torch.add),
    ("sub", torch.sub),
    ("mul", torch.mul),
    ("div", torch.div),
    ("maximum", lambda x, y: x.clamp_min(y)),
    ("minimum", lambda x, y: x.clamp_max(y)),
    ("pow", torch.pow),
)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("name", "f"), ARITHMETIC, ids=[name for name, _ in ARITHMETIC])
def test_a_number_beside_floats(
    name: str, f: Callable[..., torch.Tensor], dtype: torch.dtype
) -> None:
    """1.3 has no exact float16, in which it reaches a list of float16."""
    (x,) = lists(dtype, 1)
    compare_both(name, [x], (1.3,), [f(each, half(1.3, dtype)) for each in x], rtol=1e-6)
    numbers = [0.7, -2.0, 3.0, 1.3]
    expected = [f(each, half(number, dtype)) for each, number in zip(x, numbers, strict=True)]
    compare_both(name, [x], (numbers,), expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "maximum", "minimum"])
def test_a_number_beside_integers(name: str) -> None:
    f = dict(ARITHMETIC)[name]
    (x,) = lists(torch.int32, 1)
    compare_both(name, [x], (3,), [f(each, 3) for each in x])
    compare_both(name, [x], ([1, 2, 3, 4],), [f(each, i + 1) for i, each in enumerate(x)])


def test_a_number_to_the_power_of_each_tensor() -> None:
    (x,) = lists(torch.float32, 1)
    compare(list(torch._foreach_pow(2.0, on_device(x))), [2.0**each for each in x], rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, dtype) for name in ("mul", "maximum", "minimum", "pow") for dtype in NUMBERS),
        *(("div", dtype) for dtype in FLOATS),
    ],
)
def test_two_lists(name: str, dtype: torch.dtype) -> None:
    x, y = lists(dtype, 2)
    f = getattr(torch, name)
    compare_both(
        name, [x, y], (), [f(one, other) for one, other in zip(x, y, strict=True)], rtol=1e-6
    )


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("name", ["add", "sub"])
def test_two_lists_with_a_factor(name: str, dtype: torch.dtype) -> None:
    """bfloat16 is rounded once; of a difference of float16 also what is scaled."""
    x, y = lists(dtype, 2)
    f = getattr(torch, name)
    alpha = 3 if dtype == torch.int32 else half(1.3, dtype)

    def expected(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        if dtype == torch.bfloat16:
            return f(one.float(), other.float(), alpha=alpha).to(dtype)
        if dtype == torch.float16 and name == "sub":
            return one - other * alpha
        return f(one, other, alpha=alpha)

    npu = getattr(torch, f"_foreach_{name}")(
        on_device(x), on_device(y), alpha=3 if dtype == torch.int32 else 1.3
    )
    compare(npu, [expected(*pair) for pair in zip(x, y, strict=True)], rtol=1e-6)


@pytest.mark.parametrize("dtype", FLOATS)
def test_between_two_lists(dtype: torch.dtype) -> None:
    x, y, weight = lists(dtype, 3)
    pairs = list(zip(x, y, strict=True))
    compare_both("lerp", [x, y], (0.3,), [torch.lerp(a, b, 0.3) for a, b in pairs], rtol=1e-6)
    expected = [torch.lerp(a, b, w) for (a, b), w in zip(pairs, weight, strict=True)]
    compare_both("lerp", [x, y, weight], (), expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("name", "combine"), [("addcmul", torch.mul), ("addcdiv", torch.div)])
def test_three_lists(name: str, combine: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    """Kernels of float16 round the product; those of bfloat16 compute in float32."""
    x, y, z = lists(dtype, 3)
    numbers = [0.7, -2.0, 3.0, 1.3]

    def expected(one: torch.Tensor, y: torch.Tensor, z: torch.Tensor, by: float) -> torch.Tensor:
        if dtype == torch.float16:
            return torch.add(one, combine(y, z), alpha=half(by, dtype))
        return (one.float() + combine(y.float(), z.float()) * by).to(dtype)

    rows = list(zip(x, y, z, strict=True))
    compare_both(name, [x, y, z], (1.3,), [expected(*row, 1.3) for row in rows], rtol=1e-6)
    compare_both(
        name,
        [x, y, z],
        (torch.tensor(numbers, dtype=dtype),),
        [
            expected(*row, torch.tensor(number, dtype=dtype).item())
            for row, number in zip(rows, numbers, strict=True)
        ],
        rtol=1e-6,
    )


@pytest.mark.parametrize(
    ("mode", "rounded"), [(4, [-3.0, -1.0, 1.0, 3.0]), (1, [-2.0, -0.0, 0.0, 2.0])]
)
def test_halves_are_rounded_as_the_mode_says(mode: int, rounded: list[float]) -> None:
    """4 goes away from zero, 1 to the even neighbour."""
    x = torch.tensor([-2.5, -0.5, 0.5, 2.5]).npu()
    out = torch.empty_like(x)
    call("ForeachRoundOffNumberV2", [x], Number(mode, torch.int8), [out])
    compare(out, torch.tensor(rounded))
