"""Gated activations equal their definition in torch on the CPU, computed in float32."""

import ctypes

import pytest
import torch
import torch_npu
from hypothesis import given
from hypothesis import strategies as st

from vllm_davinci.operators.quantization import dynamic_quant_in_launch, to_int8
from vllm_davinci_testing.operators import aclnn
from vllm_davinci_testing.operators.comparison import compare
from vllm_davinci_testing.operators.strategies import FLOATS, Pair, tensors, values

silu = torch.nn.functional.silu
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.float16: {"rtol": 2e-3, "atol": 1e-3},
    torch.bfloat16: {"rtol": 1e-2, "atol": 1e-3},
}
WIDE = ((6, 8), (3, 4, 128), (2, 1026), (0, 4))


@given(x=tensors(FLOATS, WIDE, low=-30, high=30, special=True), dim=st.sampled_from([-1, 1]))
def test_swiglu_equals_its_definition(x: Pair, dim: int) -> None:
    gate, value = x.cpu.float().chunk(2, dim)
    compare(
        torch_npu.npu_swiglu(x.npu.contiguous(), dim=dim),
        (silu(gate) * value).to(x.cpu.dtype),
        **TOLERANCE[x.cpu.dtype],
    )


def test_swiglu_is_exact_over_the_range_of_the_exponential() -> None:
    gate = torch.linspace(-88, 88, 4096)
    x = torch.stack([gate, torch.ones_like(gate)], -1)
    expected = silu(gate.double()).float()[:, None]
    compare(torch_npu.npu_swiglu(x.npu()), expected, rtol=1e-6, atol=1e-38)


@pytest.mark.refused_calls
def test_swiglu_of_an_odd_dimension_is_refused() -> None:
    with pytest.raises(RuntimeError):
        torch_npu.npu_swiglu(torch.ones(2, 5).npu())
        torch.npu.synchronize()


def clipped(gate: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Computes clipped SwiGLU with limit 7, alpha 1.702 and bias 1."""
    gate, value = gate.clamp_max(7.0), value.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (value + 1.0)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_clipped_swiglu_equals_its_definition(interleaved: bool, dtype: torch.dtype) -> None:
    x = values((6, 64), dtype, 1, low=-20, high=20)
    wide = x.float()
    gate, value = (wide[:, ::2], wide[:, 1::2]) if interleaved else wide.chunk(2, -1)
    expected = clipped(gate, value).to(dtype)
    npu = torch_npu.npu_clipped_swiglu(x.npu(), interleaved=interleaved)
    compare(npu, expected, **TOLERANCE[dtype])
    groups = torch.tensor([1, 3])
    npu = torch_npu.npu_clipped_swiglu(x.npu(), group_index=groups.npu(), interleaved=interleaved)
    compare(npu[:4], expected[:4], **TOLERANCE[dtype])


@pytest.mark.parametrize("cumulative", [True, False])
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_swiglu_quant_scales_each_group(cumulative, dynamic, dtype):
    x = values((6, 64), dtype, 1)
    smooth = values((2, 32), torch.float32, 2, low=0.5, high=2)
    offsets = values((2, 32), torch.float32, 3)
    index = torch.tensor([2, 6] if cumulative else [2, 4], dtype=torch.int32)
    y, scale = torch_npu.npu_swiglu_quant(
        x.npu(),
        smooth_scales=smooth.npu(),
        offsets=offsets.npu(),
        group_index=index.npu(),
        activate_left=True,
        quant_mode=int(dynamic),
        group_list_type=0 if cumulative else 1,
    )
    gate, value = x.float().chunk(2, -1)
    groups = torch.tensor([0, 0, 1, 1, 1, 1])
    out = silu(gate) * value * smooth[groups]
    if dynamic:
        expected_y, expected_scale = dynamic_quant_in_launch(out)
        compare(scale, 1 / expected_scale, rtol=1e-5)  # the factors of the values
    else:
        expected_y = to_int8(out + offsets[groups])
    compare(y, expected_y, atol=1)


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("activate_left", [True, False])
def test_dequant_swiglu_quant_equals_its_definition(mode: int, activate_left: bool) -> None:
    x = values((6, 64), torch.int32, 1, low=-1000, high=1000)
    weight_scale = values((2, 64), torch.float32, 2, low=0.001, high=0.01)
    activation_scale = values((6, 1), torch.float32, 3, low=0.5, high=2)
    quant_scale = values((2, 32), torch.float32, 4, low=0.5, high=2)
    index = torch.tensor([4, 2])
    y, scale = torch_npu.npu_dequant_swiglu_quant(
        x.npu(),
        weight_scale=weight_scale.npu(),
        activation_scale=activation_scale.npu(),
        quant_scale=quant_scale.npu(),
        group_index=index.npu(),
        activate_left=activate_left,
        quant_mode=1,
        swiglu_mode=mode,
    )
    groups = torch.tensor([0, 0, 0, 0, 1, 1])
    wide = x.float() * weight_scale[groups] * activation_scale
    left, right = (wide[:, ::2], wide[:, 1::2]) if mode == 1 else wide.chunk(2, -1)
    if mode != 1 and not activate_left:
        left, right = right, left
    out = silu(left) * right if mode == 0 else clipped(left, right)
    expected_y, expected_scale = dynamic_quant_in_launch(out * quant_scale[groups])
    compare(y, expected_y, atol=1)
    compare(scale, expected_scale, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
def test_dequant_swiglu_quant_adds_the_bias_of_a_row_s_group(dtype: torch.dtype) -> None:
    x = values((6, 64), torch.int32, 1, low=-1000, high=1000)
    weight_scale = values((2, 64), torch.float32, 2, low=0.001, high=0.01)
    activation_scale = values((6, 1), torch.float32, 3, low=0.5, high=2)
    bias = values((2, 64), dtype, 4, low=-900, high=900)
    y, scale = torch_npu.npu_dequant_swiglu_quant(
        x.npu(),
        weight_scale=weight_scale.npu(),
        activation_scale=activation_scale.npu(),
        bias=bias.npu(),
        group_index=torch.tensor([4, 2]).npu(),
        activate_left=True,
        quant_mode=1,
    )
    groups = torch.tensor([0, 0, 0, 0, 1, 1])
    before, after = (bias[groups], 0) if dtype == torch.int32 else (0, bias[groups])
    wide = (x + before).float() * weight_scale[groups] * activation_scale + after
    gate, value = wide.chunk(2, -1)
    expected_y, expected_scale = dynamic_quant_in_launch(silu(gate) * value)
    compare(y, expected_y, atol=1)
    compare(scale, expected_scale, rtol=1e-5)


def test_dequant_swiglu_quant_with_fixed_scales_divides_by_them() -> None:
    x = values((6, 64), torch.bfloat16, 1)
    quant_scale = values((1, 32), torch.float32, 2, low=0.01, high=0.1)
    offset = values((1, 32), torch.float32, 3)
    y, _ = torch_npu.npu_dequant_swiglu_quant(
        x.npu(),
        quant_scale=quant_scale.npu(),
        quant_offset=offset.npu(),
        activate_left=True,
        quant_mode=0,
    )
    gate, value = x.float().chunk(2, -1)
    out = silu(gate) * value / quant_scale + offset
    compare(y, to_int8(out), atol=1)


def test_groups_that_cover_more_rows_than_there_are_get_refused() -> None:
    with pytest.raises(RuntimeError, match="covers 9 rows"):
        torch_npu.npu_clipped_swiglu(torch.ones(4, 8).npu(), group_index=torch.tensor([4, 5]).npu())
        torch.npu.synchronize()


def test_first_version_of_dequant_swiglu_quant_equals_its_definition() -> None:
    x = values((6, 64), torch.int32, 1, low=-1000, high=1000)
    bias = values((1, 64), torch.int32, 2, low=-100, high=100)
    weight_scale = values((1, 64), torch.float32, 3, low=0.001, high=0.01)
    y, scale = torch.zeros(6, 32, dtype=torch.int8).npu(), torch.zeros(6).npu()
    aclnn.call(
        "DequantSwigluQuant", x.npu(), weight_scale.npu(), None, bias.npu(), None, None, None,
        True, ctypes.c_char_p(b"dynamic"), y, scale,
    )  # fmt: skip
    gate, value = ((x + bias).float() * weight_scale).chunk(2, -1)
    expected_y, expected_scale = dynamic_quant_in_launch(silu(gate) * value)
    compare(y, expected_y, atol=1)
    compare(scale, expected_scale, rtol=1e-5)
