"""States in pages: their position; no byte outside them is written."""

import pytest
import torch

from vllm_davinci.core.linear_attention.state_pages import PackedStatePages, StatePages

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
    assert torch.equal(after[[4, 1], used:], before[[4, 1], used:])  # a page's padding
    others = [0, 2, 3, 5]
    assert torch.equal(after[others], before[others])


@pytest.mark.parametrize(("first", "stride"), [(64, 320), (256, 512), (36, 324)])
def test_states_in_packed_blocks_come_back_and_no_other_byte_changes(first, stride, device):
    """first, stride: in bytes; the null block has other rows and is read as zeros."""
    used = 60 * 2 + 32 * 4  # bytes of 2 states
    before = torch.randint(1, 100, (6, stride), dtype=torch.int8)
    memory = before.flatten().to(device)
    pages = PackedStatePages(memory, first, stride, ((3, 20), (2, 4, 4)), DTYPES)
    blocks = torch.tensor([4, 0, 1], dtype=torch.int32, device=device)
    copies = pages.gather(blocks)
    assert not copies[1].any() and copies[0].any()
    conv, state = pages.states(copies)
    conv[::2] = torch.arange(120).view(2, 3, 20)
    state[::2] = torch.arange(64).view(2, 2, 4, 4)
    pages.scatter(blocks, copies)
    conv, state = pages.states(pages.gather(blocks))
    assert conv[::2].flatten().tolist() == list(range(120))
    assert state[::2].flatten().tolist() == list(range(64))
    after = memory.cpu().view(6, stride)
    outside = torch.ones(stride, dtype=torch.bool)
    outside[first : first + used] = False
    assert torch.equal(after[[1, 4]][:, outside], before[[1, 4]][:, outside])
    assert torch.equal(after[[2, 3, 5]], before[[2, 3, 5]])
