"""A block's keys and values, or a request's states, lie within its page for all sizes."""

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_davinci.core.kv_cache.shared_pages import SLOTS_PER_KEY, paged_cache_in_pages

NUM_BLOCKS, OPERATOR_BLOCK, HEADS, SIZE = 5, 128, 2, 16


@pytest.mark.parametrize("per_block", [1, 2, 3])
def test_slots_of_a_block_are_in_its_page_and_no_two_are_the_same(per_block, device):
    block_size = per_block * OPERATOR_BLOCK
    spec = FullAttentionSpec(
        block_size=block_size, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.bfloat16
    )
    region = torch.zeros(NUM_BLOCKS * spec.page_size_bytes, dtype=torch.int8, device=device)
    cache = paged_cache_in_pages(region, spec, OPERATOR_BLOCK)
    assert cache.key.is_contiguous() and cache.value.is_contiguous()
    seen = torch.zeros(NUM_BLOCKS, spec.page_size_bytes, dtype=torch.bool)
    for block in range(NUM_BLOCKS):
        slots = block * SLOTS_PER_KEY * block_size + torch.arange(block_size, device=device)
        for part in (cache.key, cache.value):
            region.zero_()
            part.view(-1, HEADS, SIZE)[slots] = 1
            written = region.view(NUM_BLOCKS, -1).cpu().bool()
            assert written.any(1).nonzero().flatten().tolist() == [block]
            # A bf16 of 1 has the bytes 80 3F.
            assert int(written.sum()) == block_size * HEADS * SIZE * 2
            assert not (written & seen).any()
            seen |= written
    assert seen.all()
