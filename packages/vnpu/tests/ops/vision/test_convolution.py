"""Convolutions equal torch's on the CPU."""

import ctypes

import pytest
import torch

from vllm_davinci_testing.operators import aclnn
from vllm_davinci_testing.operators.comparison import compare
from vllm_davinci_testing.operators.strategies import values

functional = torch.nn.functional
TOLERANCE = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    torch.float16: {"rtol": 1e-2, "atol": 2e-2},
    torch.bfloat16: {"rtol": 2e-2, "atol": 1e-1},
}
SPATIAL = {1: (17,), 2: (9, 7), 3: (5, 6, 4)}


@pytest.mark.parametrize(
    "padding",
    [(0, 2), (1, 1), (1, 0, 2, 3), (1, 1, 2, 2)],
    ids=lambda sides: "-".join(map(str, sides)),
)
def test_each_side_of_an_image_may_have_its_own_padding(padding: tuple[int, ...]) -> None:
    """Only torch_npu's `_nnpack_spatial_convolution` supports this."""
    dims = len(padding) // 2
    image = values((2, 4, *SPATIAL[dims]), torch.float32, 1)
    weight = values((6, 4, *[2] * dims), torch.float32, 2, low=-1, high=1)
    sides = [side for at in reversed(range(dims)) for side in padding[2 * at : 2 * at + 2]]
    expected = getattr(functional, f"conv{dims}d")(functional.pad(image, sides), weight)
    out = torch.empty(expected.shape, device="npu")
    ones, zeros = (1,) * dims, (0,) * dims
    aclnn.call(
        "Convolution", image.npu(), weight.npu(), None, ones, padding, ones, False, zeros, 1, out,
        ctypes.c_int8(0),
    )  # fmt: skip
    compare(out, expected, **TOLERANCE[torch.float32])


def test_patches_of_an_image_become_vectors_as_on_the_cpu() -> None:
    image = values((2, 3, 28, 28), torch.float32, 1)
    weight = values((32, 3, 14, 14), torch.float32, 2, low=-0.1, high=0.1)
    compare(
        functional.conv2d(image.npu(), weight.npu(), stride=14),
        functional.conv2d(image, weight, stride=14),
        **TOLERANCE[torch.float32],
    )


def test_channels_last_image_equals_torch() -> None:
    image = values((2, 8, 8, 3), torch.float32, 1).permute(0, 3, 1, 2)
    weight = values((4, 3, 3, 3), torch.float32, 2)
    compare(
        functional.conv2d(image.npu(), weight.npu()).contiguous(),
        functional.conv2d(image, weight).contiguous(),
        **TOLERANCE[torch.float32],
    )


def test_convolution_of_time_major_rows_equals_torch() -> None:
    x, weight = values((9, 2, 4), torch.float32, 1), values((3, 4, 6), torch.float32, 2)
    bias = values((6,), torch.float32, 3)
    compare(
        torch.conv_tbc(x.npu(), weight.npu(), bias.npu(), 1),
        torch.conv_tbc(x, weight, bias, 1),
        **TOLERANCE[torch.float32],
    )
