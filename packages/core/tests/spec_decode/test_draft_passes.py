"""Passes of a drafter: the graph that each replays, and its padding."""

from __future__ import annotations

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_davinci.core.spec_decode.draft_passes import DraftPass, DraftPasses

TABLE = torch.arange(32, dtype=torch.int32).view(8, 4)
SLOTS = torch.full((64,), -1, dtype=torch.int64)


class Model(torch.nn.Module):
    def forward(self, row: int) -> str:
        return f"eager {row}"


def passes(num_drafts: int = 3, sizes: tuple[int, ...] = (1, 4)) -> DraftPasses:
    runs = {True: lambda row: f"first {row}", False: lambda row: f"next {row}"}
    if num_drafts == 1:
        del runs[False]
    made = DraftPasses(Model(), 1 + num_drafts, runs, lambda count: TABLE[:count])
    made.use_sizes(sizes)
    return made


def common(lengths: list[int], query_lens: list[int]) -> CommonAttentionMetadata:
    ends = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=ends,
        query_start_loc_cpu=ends,
        seq_lens=seq_lens,
        seq_lens_cpu_upper_bound=seq_lens,
        num_reqs=len(lengths),
        num_actual_tokens=sum(query_lens),
        max_query_len=max(query_lens),
        max_seq_len=max(lengths),
        block_table_tensor=TABLE[: len(lengths)],
        slot_mapping=torch.arange(sum(query_lens)),
    )


def test_steps_of_equal_rows_have_a_graph_and_others_none():
    made = passes()
    assert made.plan_first(common([9, 20], [4, 4])) == DraftPass(True, 4, 4)
    assert made.plan_first(common([9, 20], [4, 3])) is None
    assert made.plan_first(common([9, 20], [9, 20])) is None  # prefills
    assert made.plan_first(common([9] * 5, [4] * 5)) is None  # no graph has size five
    assert made.plan_next(1) == DraftPass(False, 1, 1)
    assert made.plan_next(3) == DraftPass(False, 4, 1)
    assert made.plan_next(5) is None
    assert passes(num_drafts=1).plan_next(1) is None
    assert [each.num_tokens for each in made.of_size(4)] == [16, 4]


def test_a_graph_is_filled_up_with_requests_of_no_rows():
    made = passes()
    planned = DraftPass(True, 4, 4)
    padded = made.metadata(planned, common([9, 20], [4, 4]), SLOTS)
    assert padded.query_start_loc_cpu.tolist() == [0, 4, 8, 8, 8]
    assert padded.seq_lens_cpu_upper_bound is not None
    assert padded.seq_lens_cpu_upper_bound.tolist() == [9, 20, 4, 4]
    assert (padded.num_reqs, padded.num_actual_tokens) == (4, 16)
    # Always the same memory: a graph reads these addresses.
    assert padded.block_table_tensor.data_ptr() == TABLE.data_ptr()
    assert padded.slot_mapping.data_ptr() == SLOTS.data_ptr()
    assert padded.slot_mapping.shape == (16,)
    dummy = made.dummy_metadata(planned, SLOTS)
    assert dummy.query_start_loc_cpu.tolist() == [0, 4, 8, 12, 16]
    assert dummy.block_table_tensor.data_ptr() == TABLE.data_ptr()


def test_the_model_runs_the_pass_that_is_planned():
    model = Model()
    runs = {True: lambda row: f"first {row}", False: lambda row: f"next {row}"}
    made = DraftPasses(model, 4, runs, lambda count: TABLE[:count])
    assert model(1) == "eager 1"
    made.planned = DraftPass(True, 4, 4)
    assert model(2) == "first 2"
    made.planned = DraftPass(False, 4, 1)
    assert model(3) == "next 3"
