"""Tokens that a rank keeps and those that it sends, compared with counting one by one."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

from vllm_davinci.core.attention.block_table import HostBatch, NPUBlockTable
from vllm_davinci.core.attention.mla.context import plan_context
from vllm_davinci.core.attention.mla.striped_context import striped_chunk
from vllm_davinci.core.attention.stripes import Stripes

DIVISIONS = list(product((2, 4), (1, 16, 128)))


def tokens_of(stripes: Stripes, tokens: int) -> list[int]:
    return [
        token
        for token in range(tokens)
        if token // stripes.interleave % stripes.size == stripes.rank
    ]


@pytest.mark.parametrize(("size", "interleave"), DIVISIONS)
def test_lengths_equal_vllms_and_a_count(size: int, interleave: int):
    tokens = [0, 1, 5, 127, 128, 129, 300, 1000]
    for rank in range(size):
        stripes = Stripes(size, rank, interleave)
        assert stripes.lengths(tokens) == [len(tokens_of(stripes, count)) for count in tokens]
        vllms = get_dcp_local_seq_lens(torch.tensor(tokens), size, rank, interleave)
        assert stripes.lengths(tokens) == vllms.tolist()


@pytest.mark.parametrize(("size", "interleave"), DIVISIONS)
def test_every_token_has_one_slot_on_one_rank(size: int, interleave: int):
    block_size, num_tokens = 128, 700
    positions = np.arange(num_tokens)
    blocks = np.arange(3, 3 + num_tokens // (block_size * size) + 1)
    for rank in range(size):
        stripes = Stripes(size, rank, interleave)
        table = NPUBlockTable.__new__(NPUBlockTable)
        table.block_size = table.slots_per_block = block_size
        table.stripes, table.slot_mapping_mode = stripes, None
        table.host_batch = lambda count: HostBatch(np.zeros(count, dtype=int), positions)
        table.block_table = Buffer(blocks[None])
        table.slot_mapping = Buffer(np.zeros(num_tokens, dtype=np.int64))
        table.compute_slot_mapping(1, None, torch.empty(num_tokens))
        slots = table.slot_mapping.np
        kept = tokens_of(stripes, num_tokens)
        assert np.flatnonzero(slots >= 0).tolist() == kept
        # Blocks in order, each filled from its start.
        room = [block * block_size + place for block in blocks for place in range(block_size)]
        assert slots[kept].tolist() == room[: len(kept)]


class Buffer:
    """Numbers on the host, without a copy."""

    def __init__(self, numbers: np.ndarray) -> None:
        self.np = numbers

    def copy_to_gpu(self, count: int) -> None:
        pass


@pytest.mark.parametrize("contexts", [[200], [0, 200, 389], [128, 700], [1000, 0, 3]], ids=str)
@pytest.mark.parametrize(("size", "interleave"), DIVISIONS)
def test_rows_of_all_ranks_come_into_the_order_of_tokens(
    size: int, interleave: int, contexts: list[int]
):
    queries, table = [7] * len(contexts), torch.zeros(len(contexts), 8, dtype=torch.int32)
    for parts in plan_context(contexts, 1024, 128 * size):
        divisions = [Stripes(size, rank, interleave) for rank in range(size)]
        chunks = [striped_chunk(parts, queries, table, each) for each in divisions]
        sent: list[tuple[int, int] | None] = []
        for stripes, chunk in zip(divisions, chunks, strict=True):
            ranges = zip(parts, chunk.starts.tolist(), chunk.lengths.tolist(), strict=True)
            rows = [
                (part.request, token)
                for part, start, length in ranges
                for token in tokens_of(stripes, max(contexts))[start : start + length]
            ]
            sent += [*rows, *[None] * (chunk.num_gathered - len(rows))]
        tokens = [
            (part.request, token)
            for part in parts
            for token in range(part.start, part.start + part.length)
        ]
        for chunk in chunks:
            assert chunk.order is not None
            assert [sent[row] for row in chunk.order.tolist()] == tokens
            assert chunk.actual_seq_lengths_kv[-1] == len(tokens)
