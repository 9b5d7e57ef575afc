"""Reductions and scans equal torch's on the CPU."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_davinci_testing.operators.aclnn import call
from vllm_davinci_testing.operators.comparison import compare
from vllm_davinci_testing.operators.strategies import ALL, FLOATS, NUMBERS, SHAPES, Pair, tensors

Reduction = Callable[..., torch.Tensor]
FILLED = tuple(shape for shape in SHAPES if 0 not in shape)
RANKED = tuple(shape for shape in FILLED if shape)
# The order of a sum differs between memory layouts.
ORDER = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def _tolerance(x: Pair) -> dict[str, float]:
    rtol = ORDER.get(x.base.dtype, 0.0)
    return {"rtol": rtol, "atol": rtol}


@pytest.mark.parametrize("name", ["sum", "mean", "prod"])
@given(x=tensors(FLOATS, low=-1, high=1), keepdim=st.booleans())
def test_sums_equal_torch(name: str, x: Pair, keepdim: bool) -> None:
    f: Reduction = getattr(torch, name)
    compare(f(x.npu), f(x.cpu), **_tolerance(x))
    compare(f(x.npu, dtype=torch.float32), f(x.cpu, dtype=torch.float32), rtol=1e-5, atol=1e-5)
    for dim in range(-1, x.cpu.dim()):
        if x.cpu.dim():
            compare(f(x.npu, dim, keepdim), f(x.cpu, dim, keepdim), **_tolerance(x))
    if x.cpu.dim() == 3 and name != "prod":
        compare(f(x.npu, (0, 2), keepdim), f(x.cpu, (0, 2), keepdim), **_tolerance(x))


@given(x=tensors((torch.bool, torch.int32, torch.int64, torch.uint8)))
def test_sums_of_integers_are_exact(x: Pair) -> None:
    compare(x.npu.sum(), x.cpu.sum())
    compare(x.npu.sum(-1), x.cpu.sum(-1))
    compare(x.npu.prod(), x.cpu.prod())


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


@given(x=tensors(FLOATS, shapes=RANKED, special=True), keepdim=st.booleans())
def test_logsumexp_equals_torch(x: Pair, keepdim: bool) -> None:
    for dim in range(-1, x.cpu.dim()):
        compare(
            torch.logsumexp(x.npu, dim, keepdim),
            torch.logsumexp(x.cpu, dim, keepdim),
            **_tolerance(x),
        )


@pytest.mark.parametrize("name", ["max", "min", "argmax", "argmin"])
@given(x=tensors(NUMBERS, shapes=FILLED, low=-9, high=9, special=True), keepdim=st.booleans())
def test_extremes_equal_torch(name: str, x: Pair, keepdim: bool) -> None:
    f: Reduction = getattr(torch, name)
    compare(f(x.npu), f(x.cpu))
    for dim in range(-1, x.cpu.dim()):
        if x.cpu.dim():
            compare(tuple_of(f(x.npu, dim, keepdim)), tuple_of(f(x.cpu, dim, keepdim)))


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


@pytest.mark.parametrize("name", ["amax", "amin"])
@given(x=tensors(ALL, shapes=FILLED, special=True), keepdim=st.booleans())
def test_extremes_over_dims_equal_torch(name: str, x: Pair, keepdim: bool) -> None:
    f: Reduction = getattr(torch, name)
    for dims in ((), (-1,), (0,), (0, -1)):
        if len(dims) <= x.cpu.dim():
            compare(f(x.npu, dims, keepdim), f(x.cpu, dims, keepdim))


@given(x=tensors(FLOATS, shapes=FILLED, special=True), keepdim=st.booleans())
def test_aminmax_equals_torch(x: Pair, keepdim: bool) -> None:
    compare(tuple_of(torch.aminmax(x.npu)), tuple_of(torch.aminmax(x.cpu)))
    if x.cpu.dim():
        compare(
            tuple_of(torch.aminmax(x.npu, dim=-1, keepdim=keepdim)),
            tuple_of(torch.aminmax(x.cpu, dim=-1, keepdim=keepdim)),
        )


@given(x=tensors(FLOATS, shapes=((7,), (3, 5), (2, 3, 67)), special=True))
def test_aminmax_along_a_dim_and_of_all_equals_torch(x: Pair) -> None:
    low, high = x.npu.new_empty(x.cpu.shape[:-1]), x.npu.new_empty(x.cpu.shape[:-1])
    call("AminmaxDim", x.npu, -1, False, low, high)
    compare((low, high), tuple_of(torch.aminmax(x.cpu, dim=-1)))
    low, high = x.npu.new_empty(()), x.npu.new_empty(())
    call("AminmaxAll", x.npu, low, high)
    compare((low, high), tuple_of(torch.aminmax(x.cpu)))


@pytest.mark.parametrize("name", ["all", "any"])
@given(
    x=tensors((torch.bool, torch.float32, torch.int32, torch.uint8), low=0, high=2),
    keepdim=st.booleans(),
)
def test_logic_over_dims_equals_torch(name: str, x: Pair, keepdim: bool) -> None:
    f: Reduction = getattr(torch, name)
    compare(f(x.npu), f(x.cpu))
    for dim in range(-1, x.cpu.dim()):
        if x.cpu.dim():
            compare(f(x.npu, dim, keepdim), f(x.cpu, dim, keepdim))


@pytest.mark.parametrize("name", ["cumsum", "cumprod"])
@given(x=tensors((*FLOATS, torch.int32, torch.int64), low=-2, high=2))
def test_scans_equal_torch(name: str, x: Pair) -> None:
    f: Reduction = getattr(torch, name)
    for dim in range(-1, max(1, x.cpu.dim())):
        compare(f(x.npu, dim), f(x.cpu, dim), **_tolerance(x))
        compare(
            f(x.npu, dim, dtype=torch.float32),
            f(x.cpu, dim, dtype=torch.float32),
            rtol=1e-5,
            atol=1e-5,
        )


@pytest.mark.parametrize("name", ["cummax", "cummin"])
@given(x=tensors((torch.float32, torch.int32, torch.int64), special=True))
def test_running_extremes_equal_torch(name: str, x: Pair) -> None:
    f: Reduction = getattr(torch, name)
    for dim in range(-1, max(1, x.cpu.dim())):
        compare(tuple_of(f(x.npu, dim)), tuple_of(f(x.cpu, dim)))


@pytest.mark.parametrize("name", ["var", "std", "var_mean", "std_mean"])
@given(
    x=tensors(FLOATS, shapes=((7,), (3, 5), (2, 3, 67))),
    keepdim=st.booleans(),
    correction=st.integers(0, 2),
)
def test_spread_equals_torch(name: str, x: Pair, keepdim: bool, correction: int) -> None:
    f: Reduction = getattr(torch, name)
    options = {"correction": correction, "keepdim": keepdim}
    compare(tuple_of(f(x.npu)), tuple_of(f(x.cpu)), **_tolerance(x))
    for dims in ((-1,), (0,), tuple(range(x.cpu.dim()))):
        compare(
            tuple_of(f(x.npu, dims, **options)),
            tuple_of(f(x.cpu, dims, **options)),
            **_tolerance(x),
        )


@pytest.mark.parametrize("p", [0, 1, 2, 3, float("inf"), -float("inf")])
@given(x=tensors(FLOATS, shapes=RANKED), keepdim=st.booleans())
def test_norms_equal_torch(p: float, x: Pair, keepdim: bool) -> None:
    compare(torch.norm(x.npu, p), torch.norm(x.cpu, p), **_tolerance(x))
    compare(torch.norm(x.npu, p, -1, keepdim), torch.norm(x.cpu, p, -1, keepdim), **_tolerance(x))
    compare(
        torch.linalg.vector_norm(x.npu, p, -1, keepdim),
        torch.linalg.vector_norm(x.cpu, p, -1, keepdim),
        **_tolerance(x),
    )
    compare(
        torch.ops.aten.norm(x.npu, p, [-1], keepdim),
        torch.ops.aten.norm(x.cpu, p, [-1], keepdim),
        **_tolerance(x),
    )
    compare(torch.linalg.vector_norm(x.npu, p), torch.linalg.vector_norm(x.cpu, p), **_tolerance(x))


@given(x=tensors((torch.float32, torch.int32, torch.int64), shapes=RANKED, low=-50, high=50))
def test_medians_equal_torch(x: Pair) -> None:
    compare(torch.median(x.npu), torch.median(x.cpu))
    # torch on the CPU reads beyond an expanded input here.
    host = x.cpu.contiguous()
    npu, cpu = torch.median(x.npu, -1), torch.median(host, -1)
    compare(npu.values, cpu.values)
    # With several equal medians the index is not defined: compare the value at the index.
    named = torch.gather(host, -1, npu.indices.cpu().unsqueeze(-1)).squeeze(-1)
    assert torch.equal(named, cpu.values)


@given(x=tensors((torch.float32,), shapes=RANKED), bins=st.integers(1, 12))
def test_histogram_equals_torch(x: Pair, bins: int) -> None:
    compare(torch.histc(x.npu, bins, -2, 3), torch.histc(x.cpu, bins, -2, 3))
    compare(torch.histc(x.npu, bins), torch.histc(x.cpu, bins))


@given(x=tensors((torch.int32, torch.int64), shapes=((0,), (1,), (7,), (67,)), low=0, high=9))
def test_bincount_equals_torch(x: Pair) -> None:
    compare(torch.bincount(x.npu), torch.bincount(x.cpu))
    compare(torch.bincount(x.npu, minlength=20), torch.bincount(x.cpu, minlength=20))
    weights = torch.arange(float(x.cpu.numel()))
    compare(torch.bincount(x.npu, weights.npu()), torch.bincount(x.cpu, weights))


@pytest.mark.parametrize("name", ["ArgMax", "ArgMin"])
def test_positions_of_extremes_may_be_int32(name: str) -> None:
    x, out = torch.tensor([[3, 3], [2, 3], [4, 2], [6, 7]]), torch.zeros(2, dtype=torch.int32).npu()
    call(name, x.npu(), 0, False, out)
    compare(out, getattr(torch, name.lower())(x, 0).int())
