"""Norms equal their definition in torch on the CPU, computed in float32."""

import pytest
import torch
import torch_npu
from hypothesis import given

from vllm_davinci.operators.quantization import to_int8
from vllm_davinci_testing.operators import aclnn
from vllm_davinci_testing.operators.comparison import compare
from vllm_davinci_testing.operators.strategies import FLOATS, Pair, tensors, values

ROWS = ((1, 1), (7, 64), (3, 5, 67), (2, 512), (0, 16))
# Rounding to the dtype may differ if a sum runs in another order.
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.float16: {"rtol": 2e-3, "atol": 1e-3},
    torch.bfloat16: {"rtol": 1e-2, "atol": 1e-2},
}


def rms_norm(
    x: torch.Tensor, gamma: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the definition: x / sqrt(mean(x^2) + epsilon) * gamma over gamma's dimensions."""
    wide = x.float()
    dims = tuple(range(x.dim() - gamma.dim(), x.dim()))
    rstd = torch.rsqrt(wide.square().mean(dims, keepdim=True) + epsilon)
    return (wide * rstd * gamma.float()).to(x.dtype), rstd


def gamma_of(x: torch.Tensor) -> torch.Tensor:
    return values((x.shape[-1],), x.dtype, 5)


@pytest.mark.parametrize("epsilon", [1e-6, 1e-2])
@given(x=tensors(FLOATS, ROWS))
def test_rms_norm_equals_its_definition(epsilon: float, x: Pair) -> None:
    gamma = gamma_of(x.cpu)
    y, rstd = torch_npu.npu_rms_norm(x.npu, gamma.npu(), epsilon)
    expected_y, expected_rstd = rms_norm(x.cpu, gamma, epsilon)
    compare(y, expected_y, **TOLERANCE[x.cpu.dtype])
    if x.cpu.numel():
        compare(rstd, expected_rstd, rtol=1e-4)


def test_rms_norm_spreads_nan_over_its_row_only() -> None:
    x = values((3, 64), torch.bfloat16, 1)
    x[1, 7] = float("nan")
    gamma = gamma_of(x)
    y, _ = torch_npu.npu_rms_norm(x.npu(), gamma.npu(), 1e-6)
    compare(y, rms_norm(x, gamma, 1e-6)[0], **TOLERANCE[x.dtype])


@given(x=tensors(FLOATS, ROWS))
def test_gemma_rms_norm_adds_one_to_its_weights(x: Pair) -> None:
    gamma = gamma_of(x.cpu)
    y, _ = torch_npu.npu_gemma_rms_norm(x.npu, gamma.npu(), 1e-6)
    compare(y, rms_norm(x.cpu, gamma.float() + 1, 1e-6)[0], **TOLERANCE[x.cpu.dtype])


@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_add_rms_norm_quant_rounds_to_int8(divide: bool, dtype: torch.dtype) -> None:
    x1, x2, gamma = (values((5, 64), dtype, i) for i in (1, 2, 3))
    gamma, beta = gamma[0], values((64,), dtype, 4)
    scales = values((64,), torch.float32, 5, low=0.01, high=0.05)
    zero_points = values((64,), torch.int32, 6)
    y1, _, total = torch_npu.npu_add_rms_norm_quant(
        x1.npu(),
        x2.npu(),
        gamma.npu(),
        scales.npu(),
        zero_points.npu(),
        beta=beta.npu(),
        epsilon=1e-5,
        div_mode=divide,
    )
    normed = rms_norm((x1 + x2).float(), gamma, 1e-5)[0] + beta.float()
    scaled = normed / scales if divide else normed * scales
    compare(total, x1 + x2)
    compare(y1, to_int8(scaled + zero_points), atol=1)


def test_layer_norm_returns_mean_and_deviation() -> None:
    x, weight, bias = (values((4, 3, 16), torch.float32, i) for i in (1, 2, 3))
    arguments = ([3, 16], weight[0], bias[0], 1e-5)
    compare(
        torch.native_layer_norm(x.npu(), [3, 16], weight[0].npu(), bias[0].npu(), 1e-5),
        torch.native_layer_norm(x, *arguments),
        rtol=1e-5,
        atol=1e-6,
    )


def test_add_rms_norm_in_place_leaves_the_norm_and_the_sum() -> None:
    x1, x2, gamma = (values((5, 64), torch.bfloat16, i) for i in (1, 2, 3))
    npu_x1, npu_x2, rstd = x1.npu(), x2.npu(), torch.zeros(5, 1).npu()
    aclnn.call("InplaceAddRmsNorm", npu_x1, npu_x2, gamma[0].npu(), 1e-6, rstd)
    expected_y, expected_rstd = rms_norm(x1 + x2, gamma[0], 1e-6)
    compare(npu_x1, expected_y, **TOLERANCE[torch.bfloat16])
    compare(npu_x2, x1 + x2)
    compare(rstd, expected_rstd, rtol=1e-4)


def test_layer_norm_is_the_same_under_the_compatible_implementation() -> None:
    x, weight, bias = torch.randn(5, 48), torch.randn(48), torch.randn(48)
    torch_npu.npu.use_compatible_impl(True)
    try:
        actual = torch.nn.functional.layer_norm(x.npu(), (48,), weight.npu(), bias.npu())
    finally:
        torch_npu.npu.use_compatible_impl(False)
    torch.testing.assert_close(actual.cpu(), torch.nn.functional.layer_norm(x, (48,), weight, bias))


@pytest.mark.parametrize("second", ["smooth", "mask", None])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_add_rms_norm_dynamic_quant_scales_each_row(second: str | None, dtype: torch.dtype) -> None:
    x1, x2 = values((3, 5, 64), dtype, 1), values((3, 5, 64), dtype, 2)
    gamma, beta = values((64,), dtype, 3), values((64,), dtype, 4)
    smooth1, smooth2 = (values((64,), dtype, seed, low=0.5, high=2) for seed in (5, 6))
    y1, y2, x, scale1, scale2 = torch_npu.npu_add_rms_norm_dynamic_quant(
        x1.npu(),
        x2.npu(),
        gamma.npu(),
        smooth_scale1=None if second == "mask" else smooth1.npu(),
        smooth_scale2=smooth2.npu() if second else None,
        beta=beta.npu(),
        output_mask=[False, True] if second == "mask" else None,
    )
    total = (x1.float() + x2.float()).to(dtype)
    compare(x, total)
    wide = total.float()
    norm = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * gamma.float()
    for y, scale, smooth, is_asked in (
        (y1, scale1, smooth1, second != "mask"),
        (y2, scale2, smooth2, second is not None),
    ):
        if not is_asked:
            continue
        scaled = (norm + beta.float()) * smooth.float()
        largest = scaled.abs().amax(-1, keepdim=True)
        compare(scale, (largest / 127).squeeze(-1), rtol=1e-5)
        compare(y, to_int8(scaled * 127 / largest), atol=1)
