"""Matrix products equal torch's on the CPU, for any strides, empty sizes and 16-bit floats."""

import pytest
import torch
import torch_npu
from hypothesis import given
from hypothesis import strategies as st

from vllm_davinci_testing.operators.comparison import compare
from vllm_davinci_testing.operators.strategies import FLOATS, values

# The CPU's scalar loop sums float16 products in another order.
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 1e-2, "atol": 2e-2},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}


@given(dtype=st.sampled_from(FLOATS), m=st.sampled_from([1, 3, 16]), n=st.sampled_from([1, 5, 67]))
def test_addr_equals_torch(dtype: torch.dtype, m: int, n: int) -> None:
    c, a, b = values((m, n), dtype, 1), values((m,), dtype, 2), values((n,), dtype, 3)
    compare(
        torch.addr(c.npu(), a.npu(), b.npu(), alpha=0.5, beta=2),
        torch.addr(c, a, b, alpha=0.5, beta=2),
        **TOLERANCE[dtype],
    )


@pytest.mark.parametrize("name", ["addbmm_", "addmm_", "addmv_", "addr_", "baddbmm_"])
@given(dtype=st.sampled_from(FLOATS))
def test_nan_of_the_summand_is_ignored_with_a_factor_of_0(name: str, dtype: torch.dtype) -> None:
    """As documented by torch and CANN; CANN's functions skip the sum then."""
    sizes = {
        "addbmm_": ((3, 5), (2, 3, 4), (2, 4, 5)),
        "addmm_": ((3, 5), (3, 4), (4, 5)),
        "addmv_": ((3,), (3, 4), (4,)),
        "addr_": ((3, 5), (3,), (5,)),
        "baddbmm_": ((2, 3, 5), (2, 3, 4), (2, 4, 5)),
    }[name]
    summand = torch.full(sizes[0], float("nan"), dtype=dtype)
    one, other = (values(each, dtype, seed) for seed, each in enumerate(sizes[1:]))
    out_of_place = getattr(torch, name.removesuffix("_"))
    found = out_of_place(summand.npu(), one.npu(), other.npu(), beta=0)
    expected = out_of_place(summand, one, other, beta=0)
    compare(found, expected, **TOLERANCE[dtype])
    in_place = getattr(summand.npu(), name)(one.npu(), other.npu(), beta=0)
    compare(in_place, expected, **TOLERANCE[dtype])


def test_product_with_nan_and_infinity_spreads_them_as_on_the_cpu() -> None:
    a = torch.tensor([[1.0, float("nan")], [float("inf"), 2.0], [0.0, 3.0]])
    b = torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    compare(torch.mm(a.npu(), b.npu()), torch.mm(a, b))


def test_product_of_integers_is_refused_with_the_dtype() -> None:
    a = torch.ones(2, 2, dtype=torch.int32).npu()
    with pytest.raises(RuntimeError, match="float32, float16 and bfloat16; got Int"):
        torch.mm(a, a)
        torch.npu.synchronize()


# Memory layout of a weight [depth, columns]: columns contiguous, as in linear layers, or rows.
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
    """Operands and results have MLA's layout: a row contains all heads."""
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
