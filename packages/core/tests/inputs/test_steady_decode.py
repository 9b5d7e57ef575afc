"""A step that continues all decodes: inputs that are written again, and those still valid."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_davinci.core.inputs.steady_decode import SteadyDecode


@pytest.fixture
def steady() -> SteadyDecode:
    """A builder for two requests that prepares nothing."""
    return SteadyDecode(SimpleNamespace(), SimpleNamespace(np=np.zeros(2)), is_async=True)


def scheduled(requests: tuple[str, ...] = ("a", "b"), **changes: Any) -> Any:
    cached = SimpleNamespace(
        req_ids=list(requests),
        resumed_req_ids=changes.pop("resumed_req_ids", set()),
        num_computed_tokens=[5, 9],
        new_block_ids=[None, ([7],)],
    )
    nothing: dict[str, Any] = {
        "total_num_scheduled_tokens": len(requests),
        "scheduled_new_reqs": [],
        "finished_req_ids": set(),
        "new_block_ids_to_zero": None,
        "kv_cache_block_copies": None,
    }
    return SimpleNamespace(scheduled_cached_reqs=cached, **nothing | changes)


def batch(**changes: Any) -> Any:
    appended: list[Any] = []
    rows = {"b": 0, "a": 1}
    of_batch: dict[str, Any] = {
        "num_reqs": 2,
        "req_id_to_index": rows,
        "prev_req_id_to_index": rows,
        "prev_sampled_token_ids": np.zeros((2, 1)),
        "num_computed_tokens_cpu": np.zeros(4, np.int32),
        "block_table": SimpleNamespace(append_row=lambda *row: appended.append(row)),
        "appended": appended,
    }
    return SimpleNamespace(**of_batch | changes)


def test_a_mask_of_unchanged_rows_is_reused(steady: SteadyDecode):
    rows = [(5, 8), (5, 8), (8, 8), (3, 16), (5, 8), (5, 8)]
    assert [steady.has_mask(*each) for each in rows] == [False, True, False, False, False, True]


def test_changed_inputs_are_written(steady: SteadyDecode):
    step, of_batch = scheduled(), batch()
    requests = {
        name: SimpleNamespace(num_computed_tokens=0, block_ids=([1],)) for name in ("a", "b")
    }
    assert steady.only_moves_on(of_batch, step)
    steady.move_on(of_batch, requests, step)
    assert of_batch.num_computed_tokens_cpu.tolist() == [9, 5, 0, 0]
    assert [requests[name].num_computed_tokens for name in ("a", "b")] == [5, 9]
    assert [requests[name].block_ids for name in ("a", "b")] == [([1],), ([1, 7],)]
    assert of_batch.appended == [(([7],), 0)]


@pytest.mark.parametrize(
    "changes",
    [
        {"requests": ("a",)},
        {"requests": ("a", "c")},
        {"requests": ()},
        {"scheduled_new_reqs": ["c"]},
        {"resumed_req_ids": {"a"}},
        {"finished_req_ids": {"c"}},
        {"new_block_ids_to_zero": [7]},
        {"kv_cache_block_copies": [(1, 2)]},
    ],
    ids=str,
)
def test_any_other_change_is_left_to_vllm(steady: SteadyDecode, changes: dict[str, Any]):
    assert not steady.only_moves_on(batch(), scheduled(**changes))


@pytest.mark.parametrize(
    ("step", "of_batch", "expected"),
    [
        ({}, {}, True),
        ({"total_num_scheduled_tokens": 3}, {}, False),
        ({"scheduled_new_reqs": ["c"]}, {}, False),
        ({"resumed_req_ids": {"a"}}, {}, False),
        ({}, {"prev_sampled_token_ids": None}, False),
        ({}, {"prev_req_id_to_index": {"a": 0, "b": 1}}, False),
    ],
)
def test_each_request_gets_the_token_after_those_it_has(
    steady: SteadyDecode, step: dict[str, Any], of_batch: dict[str, Any], expected: bool
):
    assert steady.is_next_token(batch(**of_batch), scheduled(**step)) is expected
