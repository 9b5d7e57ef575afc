"""Sizes that cannot be captured, and the garbage collector during a capture."""

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_davinci.core.errors import DeviceError
from vllm_davinci.core.runner import step_graphs
from vllm_davinci.core.runner.step_graphs import StepGraphs, without_garbage_collection

FAILED = {8: "RuntimeError: no memory", 16: "another rank could not; see its log"}


def give_up(**options: Any) -> None:
    config = SimpleNamespace(additional_config={"torchair_graph_config": options})
    StepGraphs._give_up(SimpleNamespace(_vllm_config=config), FAILED)


def test_the_start_ends_with_the_reasons_where_that_is_asked_for():
    with pytest.raises(
        DeviceError,
        match=r"Not all graphs were captured: 8 tokens: RuntimeError: no memory; 16 tokens: .*"
        "Request fewer or smaller sizes",
    ):
        give_up(on_capture_failure="stop", enabled=True)


def test_otherwise_it_continues_without_them_and_logs_it(monkeypatch: pytest.MonkeyPatch):
    told: list[str] = []
    monkeypatch.setattr(step_graphs, "is_global_first_rank", lambda: True)
    monkeypatch.setattr(
        step_graphs.logger, "warning", lambda text, *values: told.append(text % values)
    )
    give_up()
    (line,) = told
    assert line.startswith("Graph mode continues without some sizes")
    assert "8 tokens: RuntimeError: no memory" in line


def test_a_capture_collects_no_garbage_and_leaves_the_heap_frozen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_ENABLE_CUDAGRAPH_GC", "0")
    gc.freeze()
    try:
        with without_garbage_collection():
            assert not gc.isenabled()
        assert gc.isenabled() and gc.get_freeze_count() > 0
        monkeypatch.setenv("VLLM_ENABLE_CUDAGRAPH_GC", "1")
        with without_garbage_collection():
            assert gc.isenabled()
    finally:
        gc.unfreeze()
