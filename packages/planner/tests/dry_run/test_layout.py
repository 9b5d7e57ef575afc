"""Layouts of dry-runs: how rows are distributed over expert ranks."""

import copy
import json
from pathlib import Path

import pytest
from vllm.config import ParallelConfig

from vllm_davinci.planner.dry_run.layout import Layout, busiest_rank
from vllm_davinci.planner.errors import DryRunError


@pytest.mark.parametrize(("routing", "busiest"), [("balanced", 1.0), ("1", 1.0), ("1.5", 1.5)])
def test_a_number_is_the_busiest_rank_over_the_mean(routing: str, busiest: float) -> None:
    assert busiest_rank(routing, 4) == busiest


def test_layers_of_recorded_loads_wait_for_their_busiest_ranks(tmp_path: Path) -> None:
    file = tmp_path / "loads.json"
    # Two ranks get 3 and 1 rows, then 1 and 5.
    file.write_text(json.dumps([[1, 2, 1, 0], [0, 1, 2, 3]]))
    assert busiest_rank(str(file), 2) == pytest.approx((3 + 5) / (2 + 3))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "State `balanced`, a number from 1 on, or a JSON file"),
        ("{}", "layer 0 must be a list"),
        ("[[1, 2, 3]]", "divisible by 2, the number of expert ranks"),
        ("[[0, 0]]", "all loads are zero"),
    ],
)
def test_invalid_loads_are_refused(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "loads.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(DryRunError, match=message):
        busiest_rank(str(file), 2)


@pytest.mark.parametrize("routing", ["0.5", "3"])
def test_a_rank_has_at_least_the_mean_and_at_most_all(routing: str) -> None:
    with pytest.raises(DryRunError, match="expected 1 to 2, the range"):
        busiest_rank(routing, 2)


def test_a_rank_has_its_share_of_all_rows() -> None:
    assert Layout().routed_share(16) == (1_000_000, 16_000_000)
    assert Layout(busiest=1.5).routed_share(16) == (1_500_000, 16_000_000)


@pytest.mark.parametrize("is_moe", [False, True])
def test_an_engine_starts_one_rank_and_its_worker_knows_the_others(is_moe: bool) -> None:
    whole = ParallelConfig(
        tensor_parallel_size=2,
        data_parallel_size=4,
        data_parallel_size_local=4,
        pipeline_parallel_size=2,
        distributed_executor_backend="mp",
        is_moe_model=is_moe,
    )
    engine, layout = copy.copy(whole), Layout(4, 2)
    layout.leave_one_rank(engine)
    assert (engine.data_parallel_size, engine.pipeline_parallel_size, engine.world_size) == (
        1,
        1,
        2,
    )
    assert not engine.local_engines_only
    layout.restore(engine, is_moe)
    assert (engine.pipeline_parallel_size, engine.world_size) == (2, whole.world_size)
    # Dense data-parallel ranks compute independently.
    assert engine.data_parallel_size == (4 if is_moe else 1)


def test_files_state_the_whole_engine():
    stated = Layout(data_parallel_size=2, pipeline_parallel_size=3).of_whole(
        {"chip": "one", "data_parallel_size": 1, "pipeline_parallel_size": 1}
    )
    assert stated == {"chip": "one", "data_parallel_size": 2, "pipeline_parallel_size": 3}
