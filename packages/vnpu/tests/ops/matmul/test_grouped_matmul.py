"""A grouped product equals the separate products of its groups."""

import pytest
import torch
import torch_npu
from hypothesis import given
from hypothesis import strategies as st

from vllm_davinci.operators.quantization import pack_int4
from vllm_davinci_testing.operators.comparison import compare, near
from vllm_davinci_testing.operators.strategies import FLOATS, values

COUNTS = [3, 0, 4]  # rows per group; one more row belongs to no group
ROWS, DEPTH, COLUMNS = 8, 32, 64


def group_list(form: int) -> torch.Tensor:
    counts = torch.tensor(COUNTS)
    if form == 2:
        return torch.tensor([[0, 3], [2, 4], [0, 0]]).npu()
    return (counts.cumsum(0) if form == 0 else counts).npu()


def one_by_one(products: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([*products, torch.zeros(1, products[0].shape[-1])])


@pytest.mark.parametrize("form", [0, 1, 2])
@given(
    dtype=st.sampled_from(FLOATS),
    activation=st.sampled_from([0, 1, 2, 4, 5]),
    bias=st.booleans(),
    transposed=st.booleans(),
    listed=st.booleans(),
)
def test_groups_of_rows(form, dtype, activation, bias, transposed, listed):
    x, weight = values((ROWS, DEPTH), dtype, 1), values((3, DEPTH, COLUMNS), dtype, 2)
    shift = values((3, COLUMNS), dtype, 3)
    on_device = (
        weight.transpose(1, 2).contiguous().npu().transpose(1, 2) if transposed else weight.npu()
    )
    (out,) = torch_npu.npu_grouped_matmul(
        [x.npu()], list(on_device.unbind()) if listed else [on_device],
        bias=[shift.npu()] if bias else None, group_list=group_list(form), split_item=3,
        group_type=0, group_list_type=form, act_type=activation,
    )  # fmt: skip
    act = [
        lambda t: t,
        torch.relu,
        lambda t: torch.nn.functional.gelu(t, approximate="tanh"),
        None,
        lambda t: t * torch.sigmoid(1.702 * t),
        torch.nn.functional.silu,
    ][activation]
    parts = [
        act(rows.double() @ weight[g].double() + (shift[g].double() if bias else 0))
        for g, rows in enumerate(x[:7].split(COUNTS))
    ]
    near(out, one_by_one(parts))


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("counts", [[3, 0, 70, 1], [64, 65, 0, 0], [0, 0, 0, 0]])
def test_groups_of_few_and_of_many_rows_of_bfloat16(counts: list[int], transposed: bool) -> None:
    rows = sum(counts) + 5  # extra rows without a group become zero
    x = values((rows, 131), torch.bfloat16, 1, low=-1, high=1)
    weight = values((4, 131, 200), torch.bfloat16, 2, low=-1, high=1)
    on_device = (
        weight.transpose(1, 2).contiguous().npu().transpose(1, 2) if transposed else weight.npu()
    )
    (out,) = torch_npu.npu_grouped_matmul(
        [x.npu()], [on_device], group_list=torch.tensor(counts).npu(), split_item=3, group_type=0,
        group_list_type=1,
    )  # fmt: skip
    parts = [
        part.double() @ weight[group].double()
        for group, part in enumerate(x[: sum(counts)].split(counts))
    ]
    expected = torch.cat([*parts, torch.zeros(5, 200)]).bfloat16()
    torch.testing.assert_close(out.cpu(), expected, rtol=8e-3, atol=1e-5)


def test_every_x_with_its_own_weight() -> None:
    x = [values((n, DEPTH), torch.float16, n) for n in (2, 5)]
    weight = [values((DEPTH, COLUMNS), torch.float16, n) for n in (7, 8)]
    out = torch_npu.npu_grouped_matmul(
        [t.npu() for t in x], [t.npu() for t in weight], split_item=0, group_type=-1
    )
    for got, a, b in zip(out, x, weight, strict=True):
        near(got, a.double() @ b.double())


@given(out=st.sampled_from([torch.bfloat16, torch.float16, torch.int32]), per_token=st.booleans())
def test_int8_rows_and_weights(out: torch.dtype, per_token: bool) -> None:
    x = values((ROWS, DEPTH), torch.int8, 1, low=-128, high=128)
    weight = values((3, DEPTH, COLUMNS), torch.int8, 2, low=-128, high=128)
    kind = torch.bfloat16 if out == torch.bfloat16 else torch.float32
    scale = values((3, COLUMNS), kind, 3, low=1e-4, high=1e-3)
    rows = values((ROWS,), torch.float32, 4, low=0.5, high=2)
    integers = out == torch.int32
    (y,) = torch_npu.npu_grouped_matmul(
        [x.npu()], [weight.npu()], scale=None if integers else [scale.npu()],
        per_token_scale=[rows.npu()] if per_token and not integers else None,
        group_list=group_list(1), split_item=3, group_type=0, group_list_type=1, output_dtype=out,
    )  # fmt: skip
    parts = [r.long() @ weight[g].long() for g, r in enumerate(x[:7].split(COUNTS))]
    if integers:
        compare(y, one_by_one(parts).int())
        return
    scaled = [p.double() * scale[g].double() for g, p in enumerate(parts)]
    expected = one_by_one(scaled)
    near(y, expected * rows[:, None].double() if per_token else expected)


def halves_of(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits 8-bit integers into 4-bit a and b, with 16 a + b + 8 equal to each integer."""
    high = torch.div(rows.int(), 16, rounding_mode="floor")
    return high, rows.int() - 16 * high - 8


@given(
    out=st.sampled_from([torch.bfloat16, torch.float16]),
    blocks=st.sampled_from([1, 2]),  # groups along the depth, each with its own scales
    column=st.booleans(),
)
def test_int8_rows_and_int4_weights(out: torch.dtype, blocks: int, column: bool) -> None:
    depth = 128
    x = values((ROWS, depth), torch.int8, 1, low=-128, high=128)
    weight = values((3, depth, COLUMNS), torch.int8, 2, low=-8, high=8)
    scale = values((3, blocks, COLUMNS), torch.float32, 3, low=1e-3, high=1e-2)
    bits = scale.view(torch.int32).long()
    wide = scale.repeat_interleave(depth // blocks, 1)
    of_eights = 8 * (weight * wide).sum(1)
    rows = values((ROWS,), torch.float32, 4, low=0.5, high=2)
    (y,) = torch_npu.npu_grouped_matmul(
        [x.npu()], [pack_int4(weight).npu()], bias=[of_eights.npu()], scale=[bits.npu()],
        per_token_scale=[(rows[:, None] if column else rows).npu()], group_list=group_list(1),
        split_item=3, group_type=0, group_list_type=1, output_dtype=out,
    )  # fmt: skip
    parts = []
    for group, part in enumerate(x[:7].split(COUNTS)):
        sums = []
        for half in halves_of(part):
            total = torch.zeros(len(part), COLUMNS).half()
            for block, some in enumerate(torch.arange(depth).chunk(blocks)):
                product = half[:, some].long() @ weight[group, some].long()
                total = total + (product.float() * scale[group, block]).half()
            sums.append(total.float())
        parts.append(16 * sums[0] + sums[1] + of_eights[group])
    dense = (weight * wide).double()
    exact = one_by_one([r.double() @ dense[g] for g, r in enumerate(x[:7].split(COUNTS))])
    expected = one_by_one(parts) * rows[:, None]
    compare(y, expected.to(out))
    torch.testing.assert_close(
        expected.double(), exact * rows[:, None], rtol=0, atol=2e-3 * float(exact.abs().max())
    )


@given(
    form=st.sampled_from([(8, None), (4, None), (4, 2)]),  # bits, groups along the depth
    offset=st.booleans(),
)
def test_weights_quantized_alone(form: tuple[int, int | None], offset: bool) -> None:
    bits, blocks = form
    x = values((ROWS, DEPTH), torch.float16, 1)
    low = -(2 ** (bits - 1))
    weight = values((3, DEPTH, COLUMNS), torch.int8, 2, low=low, high=-low)
    shape = (3, COLUMNS) if blocks is None else (3, blocks, COLUMNS)
    scale, shift = (
        values(shape, torch.float16, 3, low=0.01, high=0.1),
        values(shape, torch.float16, 4),
    )
    (y,) = torch_npu.npu_grouped_matmul(
        [x.npu()], [(weight if bits == 8 else pack_int4(weight)).npu()],
        antiquant_scale=[scale.npu()],
        antiquant_offset=[shift.npu() if offset else torch.zeros(shape).half().npu()],
        group_list=group_list(1), split_item=3, group_type=0, group_list_type=1,
    )  # fmt: skip

    def spread(t: torch.Tensor) -> torch.Tensor:
        return t[:, None].double() if blocks is None else t.double().repeat_interleave(16, 1)

    dense = (weight.double() + (spread(shift) if offset else 0)) * spread(scale)
    dense = dense.half().double()
    near(y, one_by_one([r.double() @ dense[g] for g, r in enumerate(x[:7].split(COUNTS))]))
