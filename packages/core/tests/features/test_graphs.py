"""Graph sizes and graph mode follow from a configuration."""

import os
import re
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CompilationConfig, CUDAGraphMode, DeviceConfig, VllmConfig

from vllm_davinci.core.config.options import DavinciConfig
from vllm_davinci.core.config.setting import Setting
from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.features.feature import Engine
from vllm_davinci.core.features.graphs import FEATURES, reason_against_graphs, settle
from vllm_davinci.core.graph.sizes import doubling_sizes, graph_batch_sizes, sample_evenly


def sizes_of(asked: list[int], doubling: bool = False, **changes: object) -> tuple[list[int], str]:
    values = {
        "max_num_seqs": 24,
        "query_len": 1,
        "tp_size": 1,
        "rounds_to_tp": False,
        "max_num_batched_tokens": 8192,
    }
    found = graph_batch_sizes(asked, doubling, **{**values, **changes})
    return found.sizes, "; ".join(found.notes)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())


@pytest.mark.parametrize(
    ("asked", "changes", "expected"),
    [
        ([], {}, [1, 24]),
        ([24], {}, [24]),
        ([8, 4, 8], {}, [4, 8, 24]),
        ([8, 32], {}, [8, 24]),
        ([64], {}, [1, 24]),
        ([], {"doubling": True}, [4, 8, 16, 24]),
        ([], {"doubling": True, "tp_size": 8}, [8, 16, 24]),
        ([2, 6], {"query_len": 3}, [6, 18, 72]),
        ([5, 9], {"rounds_to_tp": True, "tp_size": 4, "max_num_seqs": 24}, [8, 12, 24]),
        # The largest size stays, because vLLM has none above it.
        ([5], {"rounds_to_tp": True, "tp_size": 16}, [16, 24]),
        ([4, 16], {"max_num_batched_tokens": 20}, [4, 16]),
        ([], {"max_num_seqs": 1}, [1]),
    ],
)
def test_sizes(asked: list[int], changes: dict[str, object], expected: list[int]):
    assert sizes_of(asked, **changes)[0] == expected


@pytest.mark.parametrize(
    ("asked", "changes", "note"),
    [
        ([8, 32], {}, r"\[32\] are dropped: no step has more than 24 requests"),
        ([64], {}, r"are \[1, 24\]: no given size is left"),
        ([4], {"max_num_batched_tokens": 20}, r"\[24\] are dropped: a step has 20 tokens at most"),
    ],
)
def test_dropped_sizes_are_reported(asked: list[int], changes: dict[str, object], note: str):
    assert re.search(note, sizes_of(asked, **changes)[1])


def test_invalid_sizes_are_errors():
    with pytest.raises(ConfigurationError, match=r"has \[0, -2\]: sizes are requests"):
        sizes_of([0, 4, -2])
    with pytest.raises(ConfigurationError, match="No graph size is left"):
        sizes_of([], max_num_seqs=1, query_len=4, max_num_batched_tokens=2)


def test_sizes_double_up_to_the_last():
    assert doubling_sizes(1, 24) == [1, 2, 4, 8, 16, 24]
    assert doubling_sizes(8, 4) == [4]


def test_an_even_sample_keeps_first_and_last():
    assert sample_evenly([1, 2, 4, 8, 16], 3) == [1, 4, 16]
    assert sample_evenly([1, 2, 4], 1) == [4]
    assert sample_evenly([1, 2, 4], 9) == [1, 2, 4]


def settle_graph_mode(config: VllmConfig, environ: dict[str, str]) -> list[Setting]:
    """Returns the changes made by the feature row of graphs."""
    (row,) = FEATURES
    engine = Engine(config, DavinciConfig())
    if row.is_asked(engine):
        settle(engine, environ)
    return engine.changes


def with_mode(mode: CUDAGraphMode) -> VllmConfig:
    config = VllmConfig(device_config=DeviceConfig(device="npu"))
    config.compilation_config.cudagraph_mode = mode
    return config


@pytest.mark.parametrize(
    ("asked", "becomes", "reason"),
    [
        (CUDAGraphMode.NONE, CUDAGraphMode.NONE, ""),
        (CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_DECODE_ONLY, ""),
        (CUDAGraphMode.FULL, CUDAGraphMode.FULL_DECODE_ONLY, "attention of prefills"),
        (CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY, "need a compiled model"),
        (CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE, "-cc.cudagraph_mode=FULL_DECODE_ONLY"),
    ],
)
def test_an_impossible_mode_is_answered_with_the_reason(asked, becomes, reason):
    config = with_mode(asked)
    told = settle_graph_mode(config, {})
    assert config.compilation_config.cudagraph_mode == becomes
    if asked == becomes:
        assert not told
    else:
        (change,) = told
        line = change.told()
        assert line.startswith(f"cudagraph_mode = {becomes.name} (instead of {asked.name}: ")
        assert reason in line
    assert not settle_graph_mode(config, {})


@pytest.mark.parametrize(
    "environ", [{"ASCEND_LAUNCH_BLOCKING": "1"}, {"TASK_QUEUE_ENABLE": "2"}], ids=str
)
def test_variables_that_prevent_capture_are_errors(environ: dict[str, str]):
    (name,) = environ
    with pytest.raises(ConfigurationError, match=f"{name}=. excludes graph mode"):
        settle_graph_mode(with_mode(CUDAGraphMode.FULL_DECODE_ONLY), environ)
    assert not settle_graph_mode(with_mode(CUDAGraphMode.NONE), environ)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"runner_type": "pooling"}, "a pooling model does not decode"),
        ({"dbo": {"enabled": True, "decode": True}}, None),
        ({"environ": {"ASCEND_LAUNCH_BLOCKING": "1"}}, "ASCEND_LAUNCH_BLOCKING is set"),
    ],
)
def test_graph_mode_is_on_where_it_pays(changes: dict[str, Any], reason: str | None):
    config = SimpleNamespace(
        model_config=SimpleNamespace(runner_type=changes.get("runner_type", "generate")),
        additional_config={"dbo": changes.get("dbo", {})},
    )
    found = reason_against_graphs(config, changes.get("environ", {}))
    assert found is None if reason is None else reason in found


def test_graphs_and_no_graphs_at_once_is_an_error():
    with pytest.raises(ValueError, match=r"cudagraph_mode is NONE. Remove one"):
        VllmConfig(
            device_config=DeviceConfig(device="npu"),
            compilation_config=CompilationConfig(cudagraph_mode=CUDAGraphMode.NONE),
            additional_config={"torchair_graph_config": {"enabled": True}},
        )


def test_sizes_given_twice_are_an_error():
    with pytest.raises(ValueError, match="Graph sizes are given twice"):
        VllmConfig(
            device_config=DeviceConfig(device="npu"),
            compilation_config=CompilationConfig(cudagraph_capture_sizes=[1, 2]),
            additional_config={
                "torchair_graph_config": {"enabled": True, "graph_batch_sizes": [4]}
            },
        )


@pytest.mark.parametrize(
    ("method", "mode", "is_noted"),
    [
        ("ngram", CUDAGraphMode.FULL_DECODE_ONLY, True),
        ("ngram", CUDAGraphMode.NONE, False),
        ("mtp", CUDAGraphMode.FULL_DECODE_ONLY, False),
    ],
)
def test_graphs_that_drafts_seldom_fill_are_noted(method: str, mode: CUDAGraphMode, is_noted: bool):
    config = with_mode(mode)
    config.model_config = SimpleNamespace()
    config.speculative_config = SimpleNamespace(method=method, num_speculative_tokens=3)
    (row,) = FEATURES
    engine = Engine(config, DavinciConfig())
    if row.is_asked(engine):
        settle(engine, {})
    notes = engine.warnings
    assert len(notes) == is_noted
    assert all("--enforce-eager" in note and "fewer than 3" in note for note in notes)
