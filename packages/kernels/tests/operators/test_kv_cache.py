"""Copies of blocks equal their definition, also in chains and runs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_davinci import operators

ops = torch.ops.vllm_davinci
NUM_BLOCKS = 12
BLOCKS = st.integers(0, NUM_BLOCKS - 1)


@given(pairs=st.lists(st.tuples(BLOCKS, BLOCKS), max_size=20))
def test_blocks_are_copied_one_pair_after_the_other(pairs: list[tuple[int, int]]) -> None:
    caches = [
        torch.arange(NUM_BLOCKS * 6, dtype=torch.float32).view(NUM_BLOCKS, 2, 3),
        torch.arange(NUM_BLOCKS * 4).to(torch.bfloat16).view(NUM_BLOCKS, 4),
    ]
    on_device = [cache.npu() for cache in caches]
    block_pairs = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
    ops.copy_kv_blocks(on_device, block_pairs)
    operators.copy_kv_blocks(caches, block_pairs)
    for found, expected in zip(on_device, caches, strict=True):
        assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize(("start", "to"), [(0, 6), (6, 0), (0, 2), (2, 0), (3, 4)])
def test_runs_of_adjacent_pairs_keep_their_order(start: int, to: int) -> None:
    cache = torch.arange(NUM_BLOCKS * 2).view(NUM_BLOCKS, 2)
    on_device = cache.npu()
    pairs = torch.tensor([(start + i, to + i) for i in range(6)])
    ops.copy_kv_blocks([on_device], pairs)
    operators.copy_kv_blocks([cache], pairs)
    assert torch.equal(on_device.cpu(), cache)


def test_blocks_that_do_not_exist_are_refused() -> None:
    cache = torch.zeros(4, 2).npu()
    with pytest.raises(IndexError, match="block 4 of a cache of 4 blocks"):
        ops.copy_kv_blocks([cache], torch.tensor([[0, 4]]))
    with pytest.raises(ValueError, match="on the host"):
        ops.copy_kv_blocks([cache], torch.tensor([[0, 1]]).npu())
    with pytest.raises(ValueError, match="equally many blocks"):
        ops.copy_kv_blocks([cache, torch.zeros(3, 2).npu()], torch.tensor([[0, 1]]))
