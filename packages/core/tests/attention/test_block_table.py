"""Slot mapping on the host, compared with its definition."""

import numpy as np
import pytest
import torch
from vllm.v1.worker.block_table import MultiGroupBlockTable

from vllm_davinci.core.attention.block_table import HostBatch, NPUMultiGroupBlockTable


def tables(device: torch.device, **sizes: list[int]) -> MultiGroupBlockTable:
    return MultiGroupBlockTable(
        max_num_reqs=4,
        max_num_batched_tokens=1024,
        pin_memory=False,
        device=device,
        max_num_blocks=[8] * len(sizes["block_sizes"]),
        **sizes,
    )


@pytest.mark.parametrize("block_sizes", [[128], [256], [128, 256]])
def test_slots_are_block_times_size_plus_offset(block_sizes: list[int], device: torch.device):
    query_lens, computed = np.array([1, 300, 7]), np.array([200, 0, 127])
    req_indices = np.repeat(np.arange(3), query_lens)
    positions = np.concatenate(
        [np.arange(start, start + count) for start, count in zip(computed, query_lens, strict=True)]
    )
    table = NPUMultiGroupBlockTable.taking_over(
        tables(device, block_sizes=block_sizes),
        lambda num_tokens: HostBatch(req_indices[:num_tokens], positions[:num_tokens]),
    )
    generator = np.random.default_rng(0)
    manager_blocks = [
        [generator.permutation(50)[:6].tolist() for _ in range(3)] for _ in block_sizes
    ]
    for row in range(3):
        table.add_row(tuple(group[row] for group in manager_blocks), row)
    table.compute_slot_mapping(
        3,
        torch.empty(4, dtype=torch.int32, device=device),
        torch.empty(len(positions), dtype=torch.int64, device=device),
    )
    for group, size in enumerate(block_sizes):
        expected = [
            manager_blocks[group][request][position // size] * size + position % size
            for request, position in zip(req_indices, positions, strict=True)
        ]
        slots = table[group].slot_mapping.gpu[: len(positions)]
        assert slots.tolist() == expected


def test_taking_over_twice_keeps_the_buffers(device: torch.device):
    original = tables(device, block_sizes=[128])
    once = NPUMultiGroupBlockTable.taking_over(original, lambda num_tokens: None)
    twice = NPUMultiGroupBlockTable.taking_over(once, lambda num_tokens: None)
    assert twice[0].block_table.gpu is original[0].block_table.gpu
    assert twice[0].slot_mapping.np is original[0].slot_mapping.np
