"""For any requests and cuts, ubatches attend to the same tokens as the whole step.

vLLM cuts its batch description, and our builders make each part's metadata. Rows are compared by
their visible tokens, the cache blocks of these, and their own slot.
"""

from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.worker.ubatch_utils import split_attn_metadata

from vllm_davinci.core.attention.metadata import NPUAttentionMetadata, NPUAttentionMetadataBuilder
from vllm_davinci.core.attention.mla.metadata import NPUMLAMetadata, NPUMLAMetadataBuilder
from vllm_davinci.core.ubatch.planned_step import SplitStep
from vllm_davinci.multistream import split_at

CPU = torch.device("cpu")
CHUNK_ROWS = 256  # small enough that contexts need several chunks
KEYS = {"block_size": 128, "num_kv_heads": 1, "head_size": 576, "dtype": torch.float32}


class Row(NamedTuple):
    """num_visible: cached and new tokens; blocks: a row of the block table; slot: in the cache."""

    num_visible: int
    blocks: list[int]
    slot: int


class Step(NamedTuple):
    """Requests as (cached tokens, new tokens), decodes first, and the rows to cut at."""

    requests: list[tuple[int, int]]
    cuts: list[int]


@st.composite
def steps(draw: st.DrawFn) -> Step:
    cached = st.integers(0, 700)
    decodes = draw(st.lists(st.tuples(st.integers(1, 700), st.just(1)), max_size=5))
    prefills = draw(st.lists(st.tuples(cached, st.integers(2, 90)), max_size=4))
    requests = [*decodes, *prefills] or [(0, 2)]
    num_rows = max(2, sum(new for _, new in requests))
    if num_rows > sum(new for _, new in requests):
        requests.append((0, 2))
        num_rows += 1
    cuts = draw(st.sets(st.integers(1, num_rows - 1), min_size=1, max_size=min(3, num_rows - 1)))
    return Step(requests, sorted(cuts))


def batch(requests: list[tuple[int, int]]) -> CommonAttentionMetadata:
    starts = torch.tensor([0, *accumulate(new for _, new in requests)], dtype=torch.int32)
    seq_lens = torch.tensor([cached + new for cached, new in requests], dtype=torch.int32)
    num_rows = int(starts[-1])
    return CommonAttentionMetadata(
        query_start_loc=starts.clone(),
        query_start_loc_cpu=starts,
        seq_lens=seq_lens.clone(),
        num_reqs=len(requests),
        num_actual_tokens=num_rows,
        max_query_len=max(new for _, new in requests),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=torch.arange(len(requests) * 7, dtype=torch.int32).view(-1, 7),
        slot_mapping=torch.arange(1000, 1000 + num_rows),
        seq_lens_cpu_upper_bound=seq_lens,
    )


def parts(step: Step) -> list[CommonAttentionMetadata]:
    split = split_at([new for _, new in step.requests], step.cuts)
    return split_attn_metadata(SplitStep(split).slices(), batch(step.requests))


def lengths(ends: list[int]) -> list[int]:
    return [end - start for start, end in pairwise([0, *ends])]


def rows_of_requests(
    contexts: Iterable[int], ends: list[int], tables: torch.Tensor, slots: Iterable[int]
) -> list[Row]:
    slot = iter(slots)
    return [
        Row(context + new + 1, table, next(slot))
        for context, length, table in zip(contexts, lengths(ends), tables.tolist(), strict=True)
        for new in range(length)
    ]


def paged_rows(metadata: NPUAttentionMetadata) -> list[Row]:
    new_tokens = lengths(metadata.actual_seq_lengths_q)
    contexts = [seq - new for seq, new in zip(metadata.seq_lens, new_tokens, strict=True)]
    slots = metadata.slot_mapping.tolist()
    assert len(slots) == metadata.num_actual_tokens == sum(new_tokens)
    return rows_of_requests(contexts, metadata.actual_seq_lengths_q, metadata.block_table, slots)


def mla_rows(metadata: NPUMLAMetadata) -> list[Row]:
    slots = metadata.slot_mapping.tolist()
    assert len(slots) == metadata.num_actual_tokens
    rows = []
    if decode := metadata.decode:
        new_tokens = lengths(decode.actual_seq_lengths_q)
        contexts = [seq - new for seq, new in zip(decode.seq_lens, new_tokens, strict=True)]
        rows += rows_of_requests(contexts, decode.actual_seq_lengths_q, decode.block_table, slots)
        assert len(rows) == metadata.num_decode_tokens
    if prefill := metadata.prefill:
        cached: list[list[int]] = [[] for _ in range(prefill.actual_seq_lengths_q[-1])]
        tables: list[list[int]] = [[] for _ in cached]
        for chunk in prefill.context:
            row = chunk.query_rows.start
            for index, length in enumerate(lengths(chunk.actual_seq_lengths_q)):
                begin = int(chunk.starts[index])
                for _ in range(length):
                    cached[row] += range(begin, begin + int(chunk.lengths[index]))
                    tables[row] = chunk.block_table[index].tolist()
                    row += 1
        new = [n for length in lengths(prefill.actual_seq_lengths_q) for n in range(length)]
        for row, slot in enumerate(slots[len(rows) :]):
            assert cached[row] == list(range(len(cached[row])))  # each once, in order
            rows.append(Row(len(cached[row]) + new[row] + 1, tables[row], slot))
    return rows


@pytest.fixture
def paged(vllm_config: VllmConfig) -> NPUAttentionMetadataBuilder:
    return NPUAttentionMetadataBuilder(FullAttentionSpec(**KEYS), ["layer"], vllm_config, CPU)


@pytest.fixture
def mla(vllm_config: VllmConfig) -> NPUMLAMetadataBuilder:
    builder = NPUMLAMetadataBuilder(MLAAttentionSpec(**KEYS), ["layer"], vllm_config, CPU)
    builder.context_chunk_rows = CHUNK_ROWS
    return builder


CUTS_THAT_MATTER = [
    Step([(9, 1), (30, 1), (0, 8), (40, 20)], [1]),  # inside the decodes
    Step([(9, 1), (30, 1), (0, 8), (40, 20)], [2]),  # between decodes and prefills
    Step([(9, 1), (30, 1), (0, 8), (40, 20)], [5]),  # inside a prefill
    Step([(600, 60)], [20, 40]),  # one request in three parts, its context in several chunks
    Step([(5, 1), (300, 30)], [30]),  # a last row alone: a prefill's remainder that decodes
]


def with_examples(test):
    for step in CUTS_THAT_MATTER:
        test = example(step=step)(test)
    return settings(
        deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )(test)


@with_examples
@given(step=steps())
def test_paged_attention_sees_the_same(step: Step, paged: NPUAttentionMetadataBuilder):
    whole = paged_rows(paged.build(0, batch(step.requests)))
    cut = [row for part in parts(step) for row in paged_rows(paged.build(0, part))]
    assert cut == whole


@with_examples
@given(step=steps())
def test_mla_sees_the_same(step: Step, mla: NPUMLAMetadataBuilder):
    paged_view = {row.slot: row.blocks for row in rows_of_whole(step)}
    whole = mla_rows(mla.build(0, batch(step.requests)))
    cut = [row for part in parts(step) for row in mla_rows(mla.build(0, part))]
    assert [row[::2] for row in cut] == [row[::2] for row in whole]
    for row in (*cut, *whole):  # without cached tokens a prefill reads no block
        assert row.blocks in ([], paged_view[row.slot])


def rows_of_whole(step: Step) -> list[Row]:
    common = batch(step.requests)
    ends = common.query_start_loc_cpu[1:].tolist()
    contexts = [cached for cached, _ in step.requests]
    return rows_of_requests(contexts, ends, common.block_table_tensor, common.slot_mapping.tolist())
