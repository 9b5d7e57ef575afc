"""Matrix products equal torch's on the CPU: any strides, empty sizes, 16-bit floats."""

import pytest
import torch
import torch_npu
from hypothesis import given
from hypothesis import strategies as st

from vllm_davinci_testing.operators.comparison import compare
from vllm_davinci_testing.operators.strategies import FLOATS, Pair, tensors, values

SIZES = (0, 1, 3, 16, 67)
# The CPU's scalar loop sums float16 products in another order.
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 1e-2, "atol": 2e-2},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}


@st.composite
def products(draw: st.DrawFn, *, batch: tuple[int, ...] = ()) -> tuple[Pair, Pair]:
    """Operands [*batch, m, k] and [*batch, k, n] of one dtype, any strides."""
    m, k, n = (draw(st.sampled_from(SIZES)) for _ in range(3))
    dtype = (draw(st.sampled_from(FLOATS)),)
    return (
        draw(tensors(dtype, ((*batch, m, k),), low=-1, high=1)),
        draw(tensors(dtype, ((*batch, k, n),), low=-1, high=1)),
    )


@given(pair=products())
def test_mm_equals_torch(pair: tuple[Pair, Pair]) -> None:
    a, b = pair
    compare(torch.mm(a.npu, b.npu), torch.mm(a.cpu, b.cpu), **TOLERANCE[a.cpu.dtype])


@given(pair=products())
def test_mm_takes_transposed_operands(pair: tuple[Pair, Pair]) -> None:
    a, b = pair
    compare(
        torch.mm(b.npu.t(), a.npu.t()), torch.mm(b.cpu.t(), a.cpu.t()), **TOLERANCE[a.cpu.dtype]
    )


@given(pair=products(), seed=st.integers(0, 99))
def test_linear_with_and_without_bias_equals_torch(pair: tuple[Pair, Pair], seed: int) -> None:
    x, weight = pair
    dtype = x.cpu.dtype
    bias = values((weight.cpu.shape[1],), dtype, seed)
    npu_weight, cpu_weight = weight.npu.t(), weight.cpu.t()
    linear = torch.nn.functional.linear
    compare(linear(x.npu, npu_weight), linear(x.cpu, cpu_weight), **TOLERANCE[dtype])
    compare(
        linear(x.npu, npu_weight, bias.npu()), linear(x.cpu, cpu_weight, bias), **TOLERANCE[dtype]
    )


@given(pair=products(), alpha=st.sampled_from([1, 0.5, -2]), beta=st.sampled_from([0, 1, 0.25]))
def test_addmm_scales_both_terms(pair: tuple[Pair, Pair], alpha: float, beta: float) -> None:
    a, b = pair
    dtype = a.cpu.dtype
    c = values((a.cpu.shape[0], b.cpu.shape[1]), dtype, 7)
    expected = torch.addmm(c, a.cpu, b.cpu, alpha=alpha, beta=beta)
    compare(
        torch.addmm(c.npu(), a.npu, b.npu, alpha=alpha, beta=beta), expected, **TOLERANCE[dtype]
    )
    compare(c.npu().addmm_(a.npu, b.npu, alpha=alpha, beta=beta), expected, **TOLERANCE[dtype])


@given(pair=products(batch=(3,)))
def test_bmm_equals_torch(pair: tuple[Pair, Pair]) -> None:
    a, b = pair
    compare(torch.bmm(a.npu, b.npu), torch.bmm(a.cpu, b.cpu), **TOLERANCE[a.cpu.dtype])


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((5,), (5,)),
        ((4, 5), (5,)),
        ((5,), (5, 6)),
        ((2, 3, 4, 5), (5, 6)),
        ((2, 3, 4, 5), (3, 5, 6)),
        ((2, 1, 4, 5), (3, 5, 6)),
        ((2, 0, 5), (2, 5, 6)),
    ],
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_matmul_broadcasts_batches(left, right, dtype):
    a, b = values(left, dtype, 1), values(right, dtype, 2)
    compare(torch.matmul(a.npu(), b.npu()), torch.matmul(a, b), rtol=2e-2, atol=3e-2)


@given(pair=products())
def test_products_with_vectors_equal_torch(pair: tuple[Pair, Pair]) -> None:
    a, _ = pair
    dtype = a.cpu.dtype
    vector = values((a.cpu.shape[1],), dtype, 3)
    added = values((a.cpu.shape[0],), dtype, 4)
    compare(torch.mv(a.npu, vector.npu()), torch.mv(a.cpu, vector), **TOLERANCE[dtype])
    compare(
        torch.addmv(added.npu(), a.npu, vector.npu(), alpha=0.5, beta=2),
        torch.addmv(added, a.cpu, vector, alpha=0.5, beta=2),
        **TOLERANCE[dtype],
    )
    compare(torch.dot(vector.npu(), vector.npu()), torch.dot(vector, vector), **TOLERANCE[dtype])


@given(pair=products(batch=(3,)))
def test_sums_with_batched_products_equal_torch(pair: tuple[Pair, Pair]) -> None:
    a, b = pair
    dtype = a.cpu.dtype
    c = values((a.cpu.shape[1], b.cpu.shape[2]), dtype, 5)
    compare(
        torch.baddbmm(c.npu(), a.npu, b.npu, alpha=0.5, beta=2),
        torch.baddbmm(c, a.cpu, b.cpu, alpha=0.5, beta=2),
        **TOLERANCE[dtype],
    )
    compare(
        torch.addbmm(c.npu(), a.npu, b.npu, alpha=0.5, beta=2),
        torch.addbmm(c, a.cpu, b.cpu, alpha=0.5, beta=2),
        rtol=4e-2,
        atol=6e-2,
    )


@given(dtype=st.sampled_from(FLOATS), m=st.sampled_from([1, 3, 16]), n=st.sampled_from([1, 5, 67]))
def test_addr_equals_torch(dtype: torch.dtype, m: int, n: int) -> None:
    c, a, b = values((m, n), dtype, 1), values((m,), dtype, 2), values((n,), dtype, 3)
    compare(
        torch.addr(c.npu(), a.npu(), b.npu(), alpha=0.5, beta=2),
        torch.addr(c, a, b, alpha=0.5, beta=2),
        **TOLERANCE[dtype],
    )


def test_product_with_nan_and_infinity_spreads_them_as_on_the_cpu() -> None:
    a = torch.tensor([[1.0, float("nan")], [float("inf"), 2.0], [0.0, 3.0]])
    b = torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    compare(torch.mm(a.npu(), b.npu()), torch.mm(a, b))


def test_product_of_integers_is_refused_with_the_dtype() -> None:
    a = torch.ones(2, 2, dtype=torch.int32).npu()
    with pytest.raises(RuntimeError, match="float32, float16 and bfloat16; got Int"):
        torch.mm(a, a)
        torch.npu.synchronize()


# Memory layout of a weight [depth, columns]: columns dense, as in linear layers, or rows.
LAYOUTS = {"columns": lambda weight: weight.t().contiguous().t(), "rows": lambda weight: weight}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 32, 64, 65])
@pytest.mark.parametrize(
    ("columns", "depth"), [(16, 32), (35, 512), (64, 67), (5, 2048), (300, 515), (700, 1700)]
)
def test_few_rows_of_bfloat16_equal_the_product_in_float64(rows, columns, depth, layout):
    x = values((rows, depth), torch.bfloat16, 1, low=-1, high=1)
    weight = LAYOUTS[layout](values((depth, columns), torch.bfloat16, 2, low=-1, high=1))
    bias = values((columns,), torch.bfloat16, 3)
    expected = x.double() @ weight.double()
    on_device = weight.npu() if layout == "rows" else weight.t().npu().t()
    compare(torch.mm(x.npu(), on_device), expected.bfloat16(), rtol=8e-3, atol=1e-5)
    compare(
        torch.addmm(bias.npu(), x.npu(), on_device),
        (expected + bias.double()).bfloat16(),
        rtol=8e-3,
        atol=1e-5,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_of_a_decode_step_does_not_depend_on_other_rows(layout: str) -> None:
    x = values((64, 515), torch.bfloat16, 1)
    weight = values((515, 96), torch.bfloat16, 2)
    on_device = weight.npu() if layout == "rows" else weight.t().contiguous().npu().t()
    whole = torch.mm(x.npu(), on_device)
    for rows in (1, 2, 3, 5, 18):
        compare(torch.mm(x[:rows].npu(), on_device), whole[:rows].cpu())
    x[7] = float("nan")
    poisoned = torch.mm(x.npu(), on_device)
    assert poisoned[7].isnan().all().item()
    others = [row for row in range(64) if row != 7]
    compare(poisoned[others], whole.cpu()[others])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [1, 7, 64, 65])
def test_few_rows_per_head_equal_the_products_in_float64(rows: int, layout: str) -> None:
    """Operands and results in MLA's layout: a row holds all heads."""
    heads, depth, columns = 3, 40, 70
    joint = values((rows, heads, depth + 8), torch.bfloat16, 1, low=-1, high=1)
    weight = values((heads, depth, columns), torch.bfloat16, 2, low=-1, high=1)
    x = joint[..., :depth]
    on_device = (
        weight.npu()
        if layout == "rows"
        else weight.transpose(1, 2).contiguous().npu().transpose(1, 2)
    )
    expected = torch.einsum("thd,hdc->thc", x.double(), weight.double()).bfloat16()
    found = torch_npu.npu_transpose_batchmatmul(
        joint.npu()[..., :depth], on_device, perm_x1=(1, 0, 2), perm_x2=(0, 1, 2), perm_y=(1, 0, 2)
    )
    compare(found, expected, rtol=8e-3, atol=1e-5)
    compare(
        torch.bmm(x.transpose(0, 1).npu(), on_device),
        expected.transpose(0, 1),
        rtol=8e-3,
        atol=1e-5,
    )


def test_rows_and_results_may_be_slices() -> None:
    x = values((6, 200), torch.bfloat16, 1)[:, 3:70]
    weight = values((20, 300), torch.bfloat16, 2)[:, 100:167]
    out = torch.zeros(6, 50, dtype=torch.bfloat16).npu()
    torch.mm(x.npu(), weight.npu().t(), out=out[:, 10:30])
    expected = (x.double() @ weight.double().t()).bfloat16()
    compare(out[:, 10:30], expected, rtol=8e-3, atol=1e-3)
    assert out[:, :10].abs().sum().item() == 0
    assert out[:, 30:].abs().sum().item() == 0
