"""Row counts on the host: read from the device, or equal if the device only models time."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_davinci.core.fused_moe.dispatcher.row_counts import CountsWait, RowCounts

GROUP: Any = SimpleNamespace(world_size=4, rank_in_group=0, unique_name="ep:0")


@pytest.mark.parametrize(
    ("is_computed", "expected"),
    [(True, ([1, 0, 6, 3], [2, 2, 2, 5])), (False, ([2, 3, 2, 3], [2, 3, 2, 3]))],
)
def test_counts_are_the_devices_or_equal_parts(is_computed, expected):
    sent = torch.tensor([[1, 0], [0, 0], [2, 4], [3, 0]]).npu()
    received = torch.tensor([[1, 1], [0, 2], [2, 0], [5, 0]]).npu()
    counts = RowCounts(sent, received, num_rows=10)
    assert counts.wait(CountsWait("layer", is_computed=is_computed), GROUP) == expected


def test_a_device_that_computes_has_counts_to_wait_for() -> None:
    assert CountsWait("layer").is_computed
