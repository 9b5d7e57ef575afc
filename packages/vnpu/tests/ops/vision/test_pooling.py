"""Pooling and resampling of images equal torch's on the CPU."""

import pytest
import torch

from vllm_davinci_testing.operators import aclnn
from vllm_davinci_testing.operators.comparison import compare
from vllm_davinci_testing.operators.strategies import FLOATS, values

functional = torch.nn.functional
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 1e-2, "atol": 2e-2},
}


def check(function: object, shape: tuple[int, ...], dtype: torch.dtype, **options: object) -> None:
    """Compares with the CPU's result of the widened image."""
    assert callable(function)
    x = values(shape, dtype, 1)
    expected = function(x.float(), **options).to(dtype)
    compare(function(x.npu(), **options), expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 2},
        {"kernel_size": (3, 2), "stride": 1, "padding": 1},
        {"kernel_size": 3, "padding": 1, "count_include_pad": False},
        {"kernel_size": 2, "ceil_mode": True},
        {"kernel_size": 2, "divisor_override": 3},
    ],
    ids=str,
)
def test_average_pooling_equals_torch(dtype: torch.dtype, options: dict[str, object]) -> None:
    check(functional.avg_pool2d, (2, 3, 9, 7), dtype, **options)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("output_size", [(1, 1), (3, 2), (5, 7)])
def test_adaptive_average_pooling_equals_torch(dtype, output_size):
    check(functional.adaptive_avg_pool2d, (2, 3, 9, 7), dtype, output_size=output_size)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("align_corners", [True, False])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_smooth_resampling_equals_torch(mode: str, align_corners: bool, dtype: torch.dtype) -> None:
    options = {"mode": mode, "align_corners": align_corners}
    check(functional.interpolate, (2, 3, 5, 4), dtype, size=(9, 11), **options)
    check(functional.interpolate, (2, 3, 5, 4), dtype, scale_factor=2.5, **options)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nearest_resampling_equals_torch(dtype: torch.dtype) -> None:
    check(functional.interpolate, (2, 3, 5, 4), dtype, size=(9, 11), mode="nearest")
    check(functional.interpolate, (2, 3, 5, 4), dtype, scale_factor=2.5, mode="nearest")


def test_first_version_of_nearest_resampling_equals_torch() -> None:
    x, out = values((2, 3, 5, 4), torch.float32, 1), torch.zeros(2, 3, 9, 11).npu()
    aclnn.call("UpsampleNearest2d", x.npu(), (9, 11), out)
    compare(out, functional.interpolate(x, size=(9, 11), mode="nearest"))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_resampling_of_sequences_equals_torch(dtype: torch.dtype) -> None:
    check(functional.interpolate, (2, 3, 5), dtype, size=9, mode="linear")
