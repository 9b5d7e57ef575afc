"""Forbidden cuts of a step, with which a token would read blocks that a later part fills."""

import numpy as np
import pytest

from vllm_davinci.core.ubatch.prefix_order import BlockIds, CachedPrefixes, is_in_order
from vllm_davinci.core.ubatch.step_facts import BatchFacts

BLOCK = 4


def in_order(
    tables: list[list[int]], num_computed: list[int], query_lens: list[int], *cuts: int
) -> bool:
    width = max(map(len, tables))
    table = np.array([[*row, *[0] * (width - len(row))] for row in tables], np.int32)
    prefixes = CachedPrefixes([BlockIds(table, BLOCK)], np.array(num_computed))
    return is_in_order(prefixes, np.array(query_lens), cuts)


def test_prompts_without_a_common_prefix_may_be_cut_anywhere():
    for cut in range(1, 16):
        assert in_order([[1, 2], [3, 4]], [0, 0], [8, 8], cut)


@pytest.mark.parametrize(("cut", "is_legal"), [(4, False), (8, False), (11, False), (12, True)])
def test_a_reader_ahead_of_the_writer_of_its_prefix_stays_with_it(cut: int, is_legal: bool):
    # Request 0 reads block 7, which request 1 fills with its tokens 4 to 7, the step's 8 to 11.
    assert in_order([[7, 2], [6, 7, 8]], [4, 0], [4, 12], cut) is is_legal


def test_a_reader_behind_the_writer_of_its_prefix_may_be_cut_off():
    assert in_order([[6, 7, 8], [6, 9]], [0, 4], [12, 4], 12)
    # A cut inside the writer is also legal, after it has filled the block.
    assert in_order([[6, 7, 8], [6, 9]], [0, 4], [12, 4], 4)


def test_one_new_token_behind_a_prefix_of_this_step_counts_as_a_reader():
    # With the hit one token remains to compute, which looks like a decode.
    assert not in_order([[6, 2], [6, 7]], [4, 0], [1, 8], 1)
    assert in_order([[6, 7], [6, 2]], [0, 4], [8, 1], 8)


def test_a_decode_reads_blocks_of_earlier_steps_only():
    assert in_order([[1, 2], [3, 4]], [6, 0], [1, 8], 1)


def test_a_cut_inside_a_request_leaves_its_own_earlier_blocks_alone():
    # 5 tokens are cached; the cut divides the block that they share with new tokens.
    assert in_order([[1, 2, 3]], [5], [7], 1)


def test_every_cut_of_several_is_looked_at():
    tables, computed, lens = [[1, 2], [7, 3], [6, 7, 8]], [0, 4, 0], [8, 4, 12]
    assert not in_order(tables, computed, lens, 8, 12)
    assert in_order(tables, computed, lens, 8, 20)


def test_every_cache_group_is_looked_at():
    apart = BlockIds(np.array([[1, 2], [3, 4]]), BLOCK)
    shared = BlockIds(np.array([[4, 2], [4, 5]]), BLOCK)
    computed, lens = np.array([4, 0]), np.array([4, 8])
    assert is_in_order(CachedPrefixes([apart], computed), lens, [4])
    assert not is_in_order(CachedPrefixes([apart, shared], computed), lens, [4])


def test_cached_tokens_equal_those_of_the_chosen_requests():
    facts = BatchFacts(True, CachedPrefixes([], np.array([5, 100, 7])))
    assert facts.cached_tokens(np.array([True, False, True])) == 12
    assert BatchFacts(True).cached_tokens(np.array([True])) == 0
