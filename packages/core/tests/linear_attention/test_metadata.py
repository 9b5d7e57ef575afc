"""A step's requests are decodes, which have a state and come first, or prefills."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_davinci.core.linear_attention.metadata import (
    LinearAttentionMetadata,
    LinearAttentionMetadataBuilder,
)


def build(
    lengths: list[int],
    totals: list[int],
    device: torch.device,
    drafts: list[int] | None = None,
    accepted: list[int] | None = None,
) -> LinearAttentionMetadata:
    """drafts, accepted: for an engine that verifies up to 3 drafts"""
    layer = SimpleNamespace(conv_kernel_size=4)
    config: Any = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"layer": layer}),
        num_speculative_tokens=0 if drafts is None else 3,
        scheduler_config=SimpleNamespace(max_num_seqs=8),
    )
    spec: Any = SimpleNamespace()
    builder = LinearAttentionMetadataBuilder(spec, ["layer"], config, device)
    blocks = torch.arange(4 * len(lengths), dtype=torch.int32, device=device).view(-1, 4)
    common: Any = SimpleNamespace(
        num_reqs=len(lengths),
        query_start_loc_cpu=torch.tensor([0, *lengths]).cumsum(0),
        seq_lens_cpu_upper_bound=torch.tensor(totals),
        block_table_tensor=blocks,
        slot_mapping=None,
    )
    if drafts is None or accepted is None:
        return builder.build(0, common)
    kept = torch.tensor(accepted, dtype=torch.int32, device=device)
    return builder.build(0, common, kept, torch.tensor(drafts, dtype=torch.int32))


@pytest.mark.parametrize(
    ("lengths", "totals", "num_decodes", "num_prefill_tokens"),
    [
        ([1, 1, 1], [5, 9, 2], 3, 0),
        ([1, 1, 7], [5, 9, 20], 2, 7),
        ([1, 1, 7], [5, 1, 20], 1, 8),  # a first prompt of one token has no state
        ([3, 1], [3, 4], 0, 4),
        ([1, 1, 0, 0], [5, 9, 0, 0], 4, 0),  # a graph's padding
        ([1, 4, 0], [5, 4, 0], 1, 4),
    ],
)
def test_decodes_have_a_state_and_one_token(
    lengths, totals, num_decodes, num_prefill_tokens, device
):
    metadata = build(lengths, totals, device)
    assert metadata.num_decodes == num_decodes
    assert metadata.num_prefill_tokens == num_prefill_tokens
    assert (metadata.prefill is None) == (num_prefill_tokens == 0)


def test_requests_without_a_state_are_marked_fresh_in_plan_order(device: torch.device):
    metadata = build([1, 10, 200, 70], [50, 10, 200, 90], device)
    plan = metadata.prefill
    assert plan is not None
    assert plan.order.tolist() == [1, 2, 0]
    assert plan.is_fresh.tolist() == [1, 0, 1]
    assert plan.steps == ((0, 3), (3, 5), (5, 6), (6, 7))


def test_drafts_are_verified_in_order_without_an_index(device: torch.device):
    metadata = build([4, 4, 0], [50, 9, 0], device, drafts=[3, 3, -1], accepted=[1, 4, 1])
    plan = metadata.verification
    assert plan is not None
    assert (metadata.num_decodes, metadata.num_decode_tokens, plan.width) == (3, 12, 4)
    assert plan.tokens is None and plan.places is None
    assert plan.accepted.tolist() == [1, 4, 1]
    assert plan.columns.tolist() == [[0, 1, 2, 3]] * 3


def test_requests_of_other_lengths_are_padded_and_known_tokens_end_in_the_first_page(device):
    # Requests: two drafts; no drafts; three recomputed tokens after a preemption; a first prompt.
    metadata = build([3, 1, 3, 9], [50, 9, 20, 9], device, [2, 0, -1, -1], [1, 2, 1, 1])
    plan = metadata.verification
    assert plan is not None and metadata.prefill is not None
    assert (metadata.num_decodes, metadata.num_decode_tokens) == (3, 7)
    assert metadata.num_prefill_tokens == 9
    assert plan.width == 3
    assert plan.tokens is not None and plan.places is not None
    assert plan.tokens.tolist() == [0, 1, 2, 3, 7, 7, 4, 5, 6]
    assert plan.places.tolist() == [0, 1, 2, 3, 6, 7, 8]
    assert plan.columns.tolist() == [[0, 1, 2], [0, 1, 2], [2, 3, 0]]
