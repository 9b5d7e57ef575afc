"""Images sampled at given positions equal torch's on the CPU."""

import torch

functional = torch.nn.functional


def test_no_places_give_no_pixels() -> None:
    image, grid = torch.zeros(1, 3, 5, 4), torch.zeros(1, 0, 7, 2)
    assert functional.grid_sample(image.npu(), grid.npu(), align_corners=False).shape == (
        1,
        3,
        0,
        7,
    )
