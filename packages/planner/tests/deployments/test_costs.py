"""Step-time tables for deployments: which rows have one, and which are modelled again."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_davinci.planner.deployments import costs
from vllm_davinci.planner.deployments.costs import stamp_costs, write_costs
from vllm_davinci.planner.deployments.table import all_deployments
from vllm_davinci.vnpu.timing import load_machine

ROW = next(row for row in all_deployments().values() if not row.refused)


def test_rows_whose_file_is_current_are_not_modelled_again(tmp_path: Path):
    file = tmp_path / "costs.json"
    figures = load_machine(ROW.chip, ROW.topology).hash
    content = {
        "deployment": ROW.name, "chip": ROW.chip, "topology": ROW.topology, "figures": figures
    }  # fmt: skip
    file.write_text(json.dumps(content))
    assert [*write_costs([ROW], tmp_path, resume=True)] == [(ROW.name, file, "")]


def test_a_row_that_cannot_be_modelled_says_why(tmp_path: Path):
    (name, file, reason), *others = write_costs([replace(ROW, name="no-such-row")], tmp_path)
    assert (name, file, others) == ("no-such-row", None, [])
    assert "there is no deployment 'no-such-row'" in reason
    assert not list(tmp_path.iterdir())


def test_rows_that_do_not_start_are_omitted(tmp_path: Path):
    assert not [*write_costs([replace(ROW, refused="too large")], tmp_path)]


def modelled(options: tuple[str, ...], chip: str, topology: str) -> None:
    """Writes the result of a row's dry-run; all rows have the same engine."""
    figures = load_machine(chip, topology).hash
    content = {
        "engine": {"architecture": "A"}, "world_size": 2,
        "chip": chip, "topology": topology, "figures": figures,
    }  # fmt: skip
    Path(options[1].removeprefix("--step-costs=")).write_text(json.dumps(content))


PARALLEL = [row for row in all_deployments().values() if "-tp=" in str(row.arguments())][:2]


NO_ROOM = (
    "Free memory on device npu:0 (55.36/64.0 GiB) on startup is less than desired",
    "torch.OutOfMemoryError: NPU out of memory. Tried to allocate 3.56 GiB",
    "[ERROR] 2026-11-26-12:09:19 (PID:14428, Device:0, RankID:-1) ERR00006 PTA memory error",
)


def test_a_row_without_memory_for_windows_of_ubatches_is_modelled_with_less(tmp_path, monkeypatch):
    asked: list[tuple[str, ...]] = []

    def run_apart(_: Any, options: tuple[str, ...], log: Path, limit_s: float) -> str | None:
        asked.append(options)
        if len(asked) <= len(NO_ROOM):
            return NO_ROOM[len(asked) - 1]
        modelled(options, ROW.chip, ROW.topology)
        return None

    monkeypatch.setattr(costs, "run_apart", run_apart)
    [(_, file, reason)] = write_costs(PARALLEL[:1], tmp_path)
    assert file is not None and file.is_file() and not reason
    shares = ("0.87", "0.84", "0.8")
    assert asked[1:] == [(*asked[0], f"--gpu-memory-utilization={share}") for share in shares]


@pytest.mark.parametrize("at_once", [True, False])
def test_rows_of_one_engine_have_the_file_of_the_first_of_them(at_once, tmp_path, monkeypatch):
    def run_apart(_: Any, options: tuple[str, ...], log: Path, limit_s: float) -> str | None:
        modelled(options, ROW.chip, ROW.topology)
        return None

    monkeypatch.setattr(costs, "run_apart", run_apart)
    if not at_once:
        list(write_costs(PARALLEL[:1], tmp_path))
    rows = [*write_costs(PARALLEL, tmp_path, resume=True)]
    [file] = tmp_path.iterdir()
    assert [each for _, each, _ in rows] == [file, file]
    assert json.loads(file.read_text())["deployment"] == PARALLEL[0].name


S = 10**6


def steps(whole: int, decode: int) -> dict[str, Any]:
    return {
        "steps": [{"tokens": 128, "by_method": {"whole": {"only": whole}, "split": {"only": 1}}}],
        "decodes": [{"tokens": 4, "by_method": {"only": decode}}],
    }


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (steps(5 * S, 7 * S), ""),
        (steps(5 * S + 1, 7 * S), ""),
        (
            steps(6 * S, 7 * S),
            "prefill of 128 tokens: {'only': 5000000} ps, now {'only': 6000000} ps",
        ),
        (steps(5 * S, 8 * S), "decode of 4 tokens: {'only': 7000000} ps, now {'only': 8000000} ps"),
        ({**steps(5 * S, 7 * S), "engine": {"layers": 2}}, "it is for {'layers': 1}"),
    ],
    ids=["same times", "other contents of L2", "prefill", "decode", "engine"],
)
def test_a_stale_table_is_stamped_if_its_steps_take_the_same_times(
    found: dict[str, Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    figures = load_machine(ROW.chip, ROW.topology).hash
    stale = {
        "deployment": ROW.name, "chip": ROW.chip, "topology": ROW.topology, "machine": "old",
        "figures": "old", "engine": {"layers": 1}, **steps(5 * S, 7 * S),
    }  # fmt: skip
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(stale))

    def run_apart(_: Any, options: tuple[str, ...], log: Path, limit_s: float) -> str | None:
        assert options[2:] == ("--prompt-tokens=128",)
        today = {**stale, "machine": "new", "figures": figures, **found}
        Path(options[1].removeprefix("--step-costs=")).write_text(json.dumps(today))
        return None

    monkeypatch.setattr(costs, "run_apart", run_apart)
    [(_, stamped, said)] = stamp_costs([ROW], tmp_path)
    content = json.loads(file.read_text())
    if reason:
        assert stamped is None and reason in said and content == stale
    else:
        assert content == {**stale, "machine": "new", "figures": figures}
        assert not list(stamp_costs([ROW], tmp_path))  # the row is up to date now
