"""Images sampled at given positions equal torch's on the CPU."""

import pytest
import torch

from vllm_davinci_testing.operators.comparison import compare
from vllm_davinci_testing.operators.strategies import values

functional = torch.nn.functional
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize("padding_mode", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("align_corners", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_grid_sampling_equals_torch(mode, padding_mode, align_corners, dtype):
    image = values((2, 3, 5, 4), dtype, 1)
    # Also beyond the edges, so that padding is read.
    grid = values((2, 6, 7, 2), dtype, 2, low=-1.3, high=1.3)
    options = {"mode": mode, "padding_mode": padding_mode, "align_corners": align_corners}
    expected = functional.grid_sample(image.float(), grid.float(), **options).to(dtype)
    npu = functional.grid_sample(image.npu(), grid.npu(), **options)
    compare(npu, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_no_places_give_no_pixels() -> None:
    image, grid = torch.zeros(1, 3, 5, 4), torch.zeros(1, 0, 7, 2)
    assert functional.grid_sample(image.npu(), grid.npu(), align_corners=False).shape == (
        1,
        3,
        0,
        7,
    )
