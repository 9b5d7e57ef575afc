"""A rank stores and sends the same tokens as a loop over all tokens."""

from itertools import product

import pytest
import torch
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

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


@pytest.mark.parametrize("contexts", [[200], [0, 200, 389], [128, 700], [1000, 0, 3]], ids=str)
@pytest.mark.parametrize(("size", "interleave"), DIVISIONS)
def test_rows_of_all_ranks_come_into_the_order_of_tokens(size, interleave, contexts):
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
