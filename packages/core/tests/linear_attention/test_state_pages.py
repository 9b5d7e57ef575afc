"""States in pages: their position, and that no byte outside them is written."""

import pytest
import torch

from vllm_davinci.core.linear_attention.state_pages import StatePages

SHAPES, DTYPES = ((3, 10), (2, 4, 4)), (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("sizes", [[64], [48, 16], [10, 54]])
def test_states_of_two_dtypes_come_back_and_other_pages_stay(sizes, device):
    before = torch.randn(6, 64)
    parts = [part.contiguous().to(device) for part in before.split(sizes, dim=1)]
    pages = StatePages(parts, SHAPES, DTYPES)
    blocks = torch.tensor([4, 1], dtype=torch.int32, device=device)
    copies = pages.gather(blocks)
    conv, state = pages.states(copies)
    assert [(each.shape[1:], each.dtype) for each in (conv, state)] == list(
        zip(map(torch.Size, SHAPES), DTYPES, strict=True)
    )
    conv.copy_(torch.arange(60).view(2, 3, 10))
    state.copy_(torch.arange(64).view(2, 2, 4, 4))
    pages.scatter(blocks, copies)
    conv, state = pages.states(pages.gather(blocks))
    assert conv.flatten().tolist() == list(range(60))
    assert state.flatten().tolist() == list(range(64))
    after = torch.cat(parts, dim=1).cpu()
    used = (60 + 128) // 4
    assert torch.equal(after[[4, 1], used:], before[[4, 1], used:])  # the padding of a page
    others = [0, 2, 3, 5]
    assert torch.equal(after[others], before[others])
