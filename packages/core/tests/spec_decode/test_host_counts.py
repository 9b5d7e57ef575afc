"""Slots and lengths on the host, where vLLM assumes that all drafts are accepted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.utils import CpuGpuBuffer
from vllm.v1.worker.block_table import MultiGroupBlockTable

from vllm_davinci.core.attention.block_table import map_slots_on_host
from vllm_davinci.core.spec_decode.host_counts import RejectedDrafts, count_rejected

REQUESTS = ["a", "b", "c"]
BEFORE = {"b": 0, "a": 1, "gone": 2}
NUM_DRAFTS = np.array([3, 2, 1, 0])
TOKENS = [1, 3, 1, 0]  # of the previous step: one of b's, all of a's


def buffer(values: list[int]) -> CpuGpuBuffer:
    made = CpuGpuBuffer(len(values), dtype=torch.int64, device=torch.device("npu"))
    made.np[:] = values
    return made


def batch() -> Any:
    computed = torch.tensor([10, 257, 5], dtype=torch.int32).pin_memory()
    tables = MultiGroupBlockTable(
        max_num_reqs=3,
        max_num_batched_tokens=64,
        pin_memory=False,
        device=torch.device("npu"),
        block_sizes=[128],
        max_num_blocks=[8],
    )
    for row in range(3):
        tables.add_row(([4 * row + 1, 4 * row + 2, 4 * row + 3],), row)
    return SimpleNamespace(
        num_reqs=3,
        req_ids=REQUESTS,
        prev_req_id_to_index=BEFORE,
        num_computed_tokens_cpu_tensor=computed,
        num_computed_tokens_cpu=computed.numpy(),
        block_table=tables,
    )


def slots(of: Any, rejected: RejectedDrafts) -> list[int]:
    """Slots of one new token per request."""
    map_slots_on_host(of, buffer([0, 1, 2]), buffer([0, 0, 0]), rejected.counts)
    of.block_table.compute_slot_mapping(3, torch.empty(0), torch.empty(3))
    found: list[int] = of.block_table[0].slot_mapping.np[:3].tolist()
    return found


def test_requests_lose_what_was_not_kept_by_the_rows_they_had():
    rejected = count_rejected(REQUESTS, BEFORE, NUM_DRAFTS, TOKENS)
    assert rejected.tolist() == [0, 3, 0]


def test_slots_are_those_of_the_tokens_there_are():
    """Regression: by vLLM's counts, b's token would get a slot in another block."""
    of, rejected = batch(), RejectedDrafts(3)
    optimistic = slots(of, rejected)
    with rejected.known(of, NUM_DRAFTS, TOKENS) as counts:
        assert counts.tolist() == [0, 3, 0]
        exact = slots(of, rejected)
    assert optimistic == [128 + 10, 7 * 128 + 1, 9 * 128 + 5]
    assert exact == [128 + 10, 6 * 128 + 126, 9 * 128 + 5]
    assert slots(of, rejected) == optimistic  # nothing remains for the next step


def test_the_device_copies_from_memory_that_no_code_writes():
    of, rejected = batch(), RejectedDrafts(3)
    shared = of.num_computed_tokens_cpu_tensor
    with rejected.known(of, NUM_DRAFTS, TOKENS):
        copied = of.num_computed_tokens_cpu_tensor
        assert copied.tolist() == shared.tolist()
        assert copied.is_pinned() and copied.data_ptr() != shared.data_ptr()
    assert of.num_computed_tokens_cpu_tensor is shared
