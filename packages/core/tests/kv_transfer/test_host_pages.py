"""Pages on the host: bytes are unchanged, and a checksum matches only its own tokens."""

import pytest
import torch

from vllm_davinci.core.kv_transfer.host_pages import HostPages
from vllm_davinci.core.kv_transfer.seals import SEAL_BYTES

NUM_BLOCKS = 9
# Keys and values; kv_c and k_pe.
SHAPES = [((16, 2, 8), (16, 2, 8)), ((16, 1, 32), (16, 1, 8))]
DIGESTS = torch.tensor([3, -(1 << 62), 11])


def parts(shapes: tuple[tuple[int, ...], ...], device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(NUM_BLOCKS, *shape, generator=generator).to(torch.bfloat16).to(device)
        for shape in shapes
    ]


@pytest.mark.parametrize("shapes", SHAPES)
def test_one_engine_loads_blocks_that_another_stored(shapes, device):
    source = parts(shapes, device)
    target = [torch.zeros_like(part) for part in source]
    sending, receiving = (HostPages(each, NUM_BLOCKS) for each in (source, target))
    assert receiving.rows.is_pinned()
    sent, received = [4, 0, 7], [8, 2, 3]
    sending.store(sent)
    torch.npu.synchronize()
    sending.seal(torch.tensor(sent), DIGESTS)
    receiving.rows[received] = sending.rows[sent]  # like NIXL
    assert receiving.sealed(torch.tensor(received), DIGESTS).all()
    receiving.load(received)
    untouched = [block for block in range(NUM_BLOCKS) if block not in received]
    for part, got in zip(source, target, strict=True):
        assert torch.equal(part[sent].cpu(), got[received].cpu())
        assert not got[untouched].any()


@pytest.mark.parametrize("shapes", SHAPES)
def test_a_checksum_fails_for_other_tokens_and_for_partial_pages(shapes, device):
    pages = HostPages(parts(shapes, device), NUM_BLOCKS)
    blocks = torch.tensor([1, 5, 6])
    pages.store(blocks.tolist())
    torch.npu.synchronize()
    pages.seal(blocks, DIGESTS)
    assert pages.sealed(blocks, DIGESTS).all()
    # Whole pages of another prompt.
    assert not pages.sealed(blocks, DIGESTS.roll(1)).any()
    size = pages.rows.shape[1] - SEAL_BYTES
    half = pages.rows[5, size // 2 : size].clone()
    pages.rows[5, size // 2 : size] = pages.rows[6, size // 2 : size]
    assert pages.sealed(blocks, DIGESTS).tolist() == [True, False, True]
    pages.rows[5, size // 2 : size] = half
    assert pages.sealed(blocks, DIGESTS).all()
