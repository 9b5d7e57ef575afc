"""Device blocks in rows on the host: loading returns what was stored."""

import numpy as np
import pytest
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from vllm_davinci.core.kv_offload.host_rows import LARGEST_SLAB_BYTES, HostRows, Run, slab_chunks
from vllm_davinci.core.kv_offload.transfers import HostOffloadingWorker

NUM_BLOCKS = 24


@pytest.mark.parametrize("chunk_bytes", [1, 100, 4096, 73_728, 5 << 28])
@pytest.mark.parametrize("budget_bytes", [0, 99, 100, 1 << 20, 3_000_000_001, 7 << 30])
def test_slabs_stay_within_the_budget_and_fill_most_of_it(budget_bytes: int, chunk_bytes: int):
    slabs = slab_chunks(budget_bytes, chunk_bytes)
    sizes = [1 << (chunks * chunk_bytes - 1).bit_length() for chunks in slabs]
    assert sum(sizes) <= budget_bytes
    assert all(chunks > 0 for chunks in slabs)
    left = budget_bytes - sum(sizes)
    assert left < max(2 * chunk_bytes, 1)
    assert all(size <= max(LARGEST_SLAB_BYTES, 2 * chunk_bytes) for size in sizes)


def test_runs_end_where_blocks_or_rows_jump_and_at_the_end_of_a_slab():
    host = HostRows([8], slabs=[2, 1], blocks_per_chunk=2)
    blocks = np.array([5, 6, 7, 8, 9, 2])
    rows = np.array([1, 2, 3, 4, 5, 0])
    assert list(host.runs(blocks, rows)) == [
        Run(slab=0, row=1, block=5, length=3),
        Run(slab=1, row=0, block=8, length=2),
        Run(slab=0, row=0, block=2, length=1),
    ]


@pytest.mark.parametrize("blocks_per_chunk", [1, 3])
def test_loaded_blocks_have_the_stored_bytes(blocks_per_chunk: int):
    generator = torch.Generator().manual_seed(blocks_per_chunk)
    contents = [
        torch.randint(-128, 128, (NUM_BLOCKS, size), dtype=torch.int8, generator=generator)
        for size in (64, 256, 32)
    ]
    regions = [content.npu() for content in contents]
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(region, region.shape[1]) for region in regions],
        # Two groups; the first has two regions.
        [[CanonicalKVCacheRef(0, 64), CanonicalKVCacheRef(1, 256)], [CanonicalKVCacheRef(2, 32)]],
    )
    worker = HostOffloadingWorker(caches, blocks_per_chunk, slabs=[2, 4, 1, 6])
    stored, loaded = [4, 5, 6, 9, 2, 20, 21], [11, 1, 0, 3, 7, 8, 12]
    # A request has blocks 0 to 3 in the first group, 1 to 3 in the second: with chunks of several
    # blocks, the transfer starts inside a chunk.
    sizes, firsts = [4, 3], [0, 1]
    chunks = [
        -(-(first % blocks_per_chunk + n) // blocks_per_chunk)
        for n, first in zip(sizes, firsts, strict=True)
    ]
    rows = [12, 3, 0, 5, 1, 7, 9][: sum(chunks)]
    worker.submit_store(1, GPULoadStoreSpec(stored, sizes, firsts), CPULoadStoreSpec(rows))
    worker.wait({1})
    assert [result.job_id for result in worker.get_finished()] == [1]
    for region in regions:
        region.zero_()
    worker.submit_load(2, CPULoadStoreSpec(rows), GPULoadStoreSpec(loaded, sizes, firsts))
    worker.wait({2})
    [result] = worker.get_finished()
    assert (result.job_id, result.success) == (2, True)
    assert result.transfer_size == 4 * (64 + 256) + 3 * 32
    for region, content, of_group in zip(
        regions, contents, (slice(0, 4), slice(0, 4), slice(4, 7)), strict=True
    ):
        expected = torch.zeros_like(content)
        expected[loaded[of_group]] = content[stored[of_group]]
        assert torch.equal(region.cpu(), expected)
    worker.shutdown()
