"""Blocks that queries choose, and how many of their keys the attention operator reads."""

import pytest
import torch

from vllm_davinci.core.attention.block_sparse.choice import BlockRule, choose_blocks
from vllm_davinci.core.attention.block_sparse.metadata import BlockSparseMetadata
from vllm_davinci.core.device.soc import BLOCK_SIZE_TOKENS as BLOCK

RULE = BlockRule(num_chosen=3, num_local=1, index_size=16)
HEADS = 2
# Around every edge of a block, with fewer, as many, and more blocks than a query chooses.
LENGTHS = [1, *(BLOCK * full + more for full in range(1, 6) for more in (-1, 0, 1))]


def metadata_of(num_new: list[int]) -> BlockSparseMetadata:
    """A step with the last `num_new` tokens of a request of each length."""
    num_blocks = -(-max(LENGTHS) // BLOCK)
    table = torch.arange(num_blocks * len(LENGTHS), dtype=torch.int32).flip(0).view(-1, num_blocks)
    return BlockSparseMetadata(
        num_actual_tokens=sum(num_new),
        actual_seq_lengths_q=torch.tensor(num_new).cumsum(0).tolist(),
        seq_lens=LENGTHS,
        block_table=table,
        slot_mapping=torch.arange(sum(num_new)),
        num_kv_heads=HEADS,
        rule=RULE,
    )


@pytest.mark.parametrize("at_once", [1, max(LENGTHS)])
def test_queries_read_their_own_block_and_the_best_ones_before_it(at_once: int):
    generator = torch.Generator().manual_seed(at_once)
    num_new = [min(at_once, length) for length in LENGTHS]
    step = metadata_of(num_new)
    index_k = torch.randn(step.block_table.numel(), BLOCK, RULE.index_size, generator=generator)
    query = torch.randn(sum(num_new), HEADS, RULE.index_size, generator=generator)
    requests = [n for n, count in enumerate(num_new) for _ in range(count)]
    positions = [p for all_, new in zip(LENGTHS, num_new, strict=True) for p in range(all_)[-new:]]
    pages = choose_blocks(
        query, index_k, step.pieces(torch.tensor(positions)), step.block_table, RULE
    )
    num_keys = step.step_lengths()[1][::HEADS]
    for row, (request, position) in enumerate(zip(requests, positions, strict=True)):
        table, own = step.block_table[request].tolist(), position // BLOCK
        keys = index_k[table].flatten(0, 1)[: position + 1]
        full = min(own, RULE.num_chosen - 1)
        assert num_keys[row] == full * BLOCK + position % BLOCK + 1, f"position {position}"
        for head in range(HEADS):
            best = (keys @ query[row, head])[: own * BLOCK].view(own, BLOCK).amax(dim=1)
            earlier = sorted(best.topk(full).indices.tolist())
            expected = [table[block] for block in (*earlier, own)]
            assert pages[row, head, : full + 1].tolist() == expected, f"position {position}"


def test_a_step_chooses_as_soon_as_a_request_has_more_blocks_than_a_query():
    found = []
    for length in LENGTHS:
        step = metadata_of([1] * len(LENGTHS))
        step.seq_lens = [length]
        found.append(step.sees_all)
    assert found == [length <= RULE.num_chosen * BLOCK for length in LENGTHS]
