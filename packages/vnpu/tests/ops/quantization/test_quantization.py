"""Quantization, and products of quantized matrices, equal their definitions."""

import pytest
import torch
import torch_npu
from hypothesis import given
from hypothesis import strategies as st

from vllm_davinci.operators.quantization import dynamic_quant, pack_int4, to_int8
from vllm_davinci_testing.operators.comparison import compare, near
from vllm_davinci_testing.operators.strategies import FLOATS, values


@given(
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    shape=st.sampled_from([(1, 8), (5, 64), (2, 3, 40)]),
    smooth=st.booleans(),
)
def test_rows_get_their_own_scale(dtype: torch.dtype, shape: tuple[int, ...], smooth: bool) -> None:
    x, factors = values(shape, dtype, 1), values(shape[-1:], dtype, 2, low=0.5, high=2)
    x.view(-1, shape[-1])[0] = 0  # all zeros, so no range
    y, scale = torch_npu.npu_dynamic_quant(x.npu(), smooth_scales=factors.npu() if smooth else None)
    wide = x.float() * (factors.float() if smooth else 1)
    _, step = dynamic_quant(wide)
    torch.testing.assert_close(scale.cpu(), step, rtol=1e-6, atol=0)
    assert y.dtype == torch.int8
    assert (y.cpu().float() * step[..., None] - wide).abs().max() <= step.max() * 0.501


def test_groups_of_rows_have_their_own_factors() -> None:
    x, factors = (
        values((7, 16), torch.float16, 1),
        values((3, 16), torch.float16, 2, low=0.5, high=2),
    )
    ends = torch.tensor([2, 2, 7], dtype=torch.int32)
    _, scale = torch_npu.npu_dynamic_quant(
        x.npu(), smooth_scales=factors.npu(), group_index=ends.npu()
    )
    group = torch.tensor([0, 0, 2, 2, 2, 2, 2])
    _, step = dynamic_quant(x.float() * factors.float()[group])
    torch.testing.assert_close(scale.cpu(), step, rtol=1e-6, atol=0)


@given(
    dtype=st.sampled_from(FLOATS),
    per_channel=st.booleans(),
    offset=st.booleans(),
    divide=st.booleans(),
)
def test_quantize_with_a_given_scale(dtype, per_channel, offset, divide):
    x = values((3, 5, 16), dtype, 1)
    scale = values(
        (16,) if per_channel else (1,), torch.float32 if divide else dtype, 2, low=8, high=30
    )
    if divide:
        scale = 1 / scale
    kind = torch.int32 if divide else dtype
    shift = values(scale.shape, torch.int32, 3).to(kind) if offset else None
    y = torch_npu.npu_quantize(
        x.npu(), scale.npu(), shift.npu() if shift is not None else None,
        torch.qint8, -1, divide,
    )  # fmt: skip
    wide = x.float() / scale.float() if divide else x.float() * scale.float()
    if shift is not None:
        wide = wide + shift.float()
    compare(y, to_int8(wide))


def test_4_bit_integers_are_packed_by_eights() -> None:
    x = values((4, 32), torch.float16, 1)
    y = torch_npu.npu_quantize(
        x.npu(), torch.tensor([2.0]).half().npu(), None, torch.quint4x2, -1, False
    )
    compare(y, pack_int4((x.float() * 2).round().clamp(-8, 7)))


def test_scales_are_packed_for_the_matrix_unit() -> None:
    scale = values((9,), torch.float32, 1)
    packed = torch_npu.npu_trans_quant_param(scale.npu()).cpu()
    bits = scale.view(torch.int32).long() & 0xFFFFE000
    compare(packed.npu(), bits | 1 << 46)
    packed = torch_npu.npu_trans_quant_param(scale.npu(), torch.full((9,), -3.0).npu()).cpu()
    compare(packed.npu(), bits | 1 << 46 | (-3 & 0x1FF) << 37)
    rounded = torch_npu.npu_trans_quant_param(scale.npu(), round_mode=1).cpu()
    nearest = (rounded & 0xFFFFFFFF).int().view(torch.float32)
    torch.testing.assert_close(nearest, scale, rtol=2.0**-11, atol=0)


@given(activation=st.booleans(), bias=st.sampled_from([None, torch.int32, torch.float32]))
def test_dequant_bias(activation: bool, bias: torch.dtype | None) -> None:
    x = values((5, 16), torch.int32, 1, low=-1000, high=1000)
    scale, rows = values((16,), torch.float32, 2), values((5,), torch.float32, 3)
    shift = values((16,), bias, 4, low=-9, high=9) if bias else None
    y = torch_npu.npu_dequant_bias(
        x.npu(), scale.npu(), rows.npu() if activation else None,
        shift.npu() if shift is not None else None, output_dtype=torch.bfloat16,
    )  # fmt: skip
    wide = x.double()
    if bias == torch.int32:
        wide = wide + shift
    wide = wide * scale * (rows[:, None] if activation else 1)
    near(y, wide + shift if bias == torch.float32 else wide)


@pytest.mark.parametrize("weight_format", ["dense", "transposed"])
@given(
    depth=st.sampled_from([16, 64, 2080]),
    out=st.sampled_from([torch.float16, torch.bfloat16, torch.int8, torch.int32]),
    per_token=st.booleans(),
    bias=st.booleans(),
)
def test_int8_products_are_exact(weight_format, depth, out, per_token, bias):
    x = values((5, depth), torch.int8, 1, low=-128, high=128)
    weight = values((depth, 32), torch.int8, 2, low=-128, high=128)
    scale = values((32,), torch.float32, 3, low=1e-5, high=1e-4)
    rows = values((5,), torch.float32, 4, low=0.5, high=2)
    shift = values((32,), torch.int32, 5, low=-5000, high=5000)
    per_token = per_token and out in (torch.float16, torch.bfloat16)
    on_device = weight.t().contiguous().npu().t() if weight_format == "transposed" else weight.npu()
    # Scales of float16 and int8 results are packed, unless rows are scaled, too.
    packed = out in (torch.float16, torch.int8) and not per_token
    device_scale = torch_npu.npu_trans_quant_param(scale.npu()) if packed else scale.npu()
    y = torch_npu.npu_quant_matmul(
        x.npu(), on_device, device_scale, pertoken_scale=rows.npu() if per_token else None,
        bias=shift.npu() if bias else None, output_dtype=out,
    )  # fmt: skip
    total = x.long() @ weight.long() + (shift if bias else 0)
    if out == torch.int32:
        compare(y, total.int())
        return
    used = scale
    if packed:
        used = (scale.view(torch.int32) & ~0x1FFF).view(torch.float32)
    wide = total.double() * used * (rows[:, None] if per_token else 1)
    if out == torch.int8:
        assert (y.cpu().double() - wide.clamp(-128, 127)).abs().max() <= 0.501
    else:
        near(y, wide)


@pytest.mark.parametrize("bits", [8, 4])
@given(
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    groups=st.sampled_from([None, 1, 2]),
    offset=st.booleans(),
    transposed=st.booleans(),
)
def test_products_with_quantized_weights(bits, dtype, groups, offset, transposed):
    x = values((5, 64), dtype, 1)
    low = -(2 ** (bits - 1))
    weight = values((64, 32), torch.int8, 2, low=low, high=-low)
    shape = (32,) if groups is None else (groups, 32)
    scale, shift = values(shape, dtype, 3, low=0.01, high=0.05), values(shape, dtype, 4)
    stored = weight.t().contiguous() if transposed else weight
    stored = stored if bits == 8 else pack_int4(stored)
    on_device = stored.npu().t() if transposed else stored.npu()
    y = torch_npu.npu_weight_quant_batchmatmul(
        x.npu(), on_device, scale.npu(), shift.npu() if offset else None,
        antiquant_group_size=32 if groups == 2 else 0,
    )  # fmt: skip

    def spread(t: torch.Tensor) -> torch.Tensor:
        return t.double() if groups is None else t.double().repeat_interleave(64 // groups, 0)

    dense = (weight.double() + (spread(shift) if offset else 0)) * spread(scale)
    near(y, x.double() @ dense.to(dtype).double())
