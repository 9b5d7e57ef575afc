"""Cached context is divided into chunks that fit, and no token is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_davinci.core.attention.mla.context import ContextPart, plan_context

BLOCK = 128


@given(context_lens=st.lists(st.integers(0, 2000), max_size=12), max_rows=st.integers(BLOCK, 1500))
def test_chunks_fit_and_cover_every_context_once_in_order(context_lens: list[int], max_rows: int):
    chunks = plan_context(context_lens, max_rows, BLOCK)
    covered: dict[int, int] = {}
    for chunk in chunks:
        assert 0 < sum(part.length for part in chunk) <= max_rows
        requests = [part.request for part in chunk]
        assert requests == list(range(requests[0], requests[0] + len(requests)))
        for part in chunk:
            assert part.length > 0
            assert part.start % BLOCK == 0
            assert part.start == covered.get(part.request, 0)
            covered[part.request] = part.start + part.length
    assert covered == {n: length for n, length in enumerate(context_lens) if length}


def test_a_long_context_continues_in_a_chunk_with_another_request():
    assert plan_context([100, 500, 30, 0, 7], 300, BLOCK) == [
        [ContextPart(0, 0, 100), ContextPart(1, 0, 128)],
        [ContextPart(1, 128, 256)],
        [ContextPart(1, 384, 116), ContextPart(2, 0, 30)],
        [ContextPart(4, 0, 7)],
    ]


def test_a_chunk_that_cannot_hold_a_block_is_an_error():
    with pytest.raises(ValueError, match="100 rows cannot hold a block of 128"):
        plan_context([200], 100, BLOCK)
