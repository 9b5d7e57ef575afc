"""The mask of pooled features, computed on the host from positions, equals transformers'."""

import pytest
import torch
from transformers import Gemma4VisionConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4VisionPooler

from vllm_davinci.models.gemma4 import _mask_from_host


@pytest.mark.parametrize("sizes", [[(6, 9)], [(3, 3), (9, 6)], [(12, 3), (3, 12), (6, 6)]])
def test_pools_without_patches_are_those_of_transformers(sizes: list[tuple[int, int]]) -> None:
    most, side = 81, 3
    positions = torch.full((len(sizes), most, 2), -1)
    for image, (columns, rows) in enumerate(sizes):
        places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1)
        positions[image, : len(places)] = places
    pooler = Gemma4VisionPooler(Gemma4VisionConfig(hidden_size=8))
    padding = (positions == -1).all(dim=-1)
    options = {"pixel_position_ids": positions, "padding_positions": padding}
    pooled, mask = pooler(torch.ones(len(sizes), most, 8), **options, output_length=most // side**2)
    assert not mask.all()
    found, known = _mask_from_host(pooler, (), options, (pooled, torch.zeros_like(mask)))
    assert found is pooled
    assert torch.equal(known, mask)
