"""The nightly run: its parts, missed goals, and summary."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def nightly(repository: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(repository / "ci"))
    return import_module("nightly")


def row(kind: str, ratio: float) -> dict[str, object]:
    return {
        "name": "rate", "unit": "1/s", "ours": 3.0, "ratio": ratio, "kind": kind,
        "at_least": 1.0, "at_most": None, "is_met": ratio >= 1.0,
    }  # fmt: skip


def test_missed_goals_are_shown_and_fail_the_night_only_for_exact_figures(nightly):
    is_good, text = nightly.goals_of({"rows": [row("measured", 0.5), row("counted", 2.0)]}, {})
    assert is_good
    assert "1 of 2 goals met" in text
    assert "MISSED: rate 0.5 x, goal >= 1 (measured)" in text
    assert not nightly.goals_of({"rows": [row("counted", 0.5)]}, {})[0]


def test_a_goal_that_is_known_to_be_missed_fails_the_night_only_when_its_figure_changes(nightly):
    def goals(ratio: float, known: dict[str, float]) -> tuple[bool, str]:
        return nightly.goals_of({"rows": [row("modelled", ratio)]}, known)

    assert goals(0.604, {"rate": 0.6}) == (
        True, "0 of 1 goals met\nknown: rate 0.604 x, goal >= 1 (modelled)"
    )  # fmt: skip
    is_good, text = goals(0.58, {"rate": 0.6})
    assert not is_good
    assert "MISSED: rate 0.58 x" in text
    assert "known_misses.toml has 0.6" in text
    for known in ({"rate": 0.6}, {"another row": 0.6}):
        is_good, text = goals(1.2, known)
        assert not is_good
        assert f"no longer missed, remove from known_misses.toml: {next(iter(known))}" in text


def test_every_known_miss_is_a_goal_of_a_benchmark(nightly: ModuleType, repository: Path):
    misses = nightly.read_toml(nightly.KNOWN_MISSES)["miss"]
    for miss in misses:
        assert (repository / "benchmarks" / f"{miss['benchmark']}.py").exists()
        assert set(miss) == {"benchmark", "row", "value", "why"}
    assert nightly.known_misses("published/page")["R1, prefill, overlap over serial"]


def test_suites_run_at_night_where_their_checkouts_lie(nightly: ModuleType, tmp_path: Path):
    assert nightly.checkout_parts(tmp_path) == []
    for folder in ("vllm", "another"):
        (tmp_path / folder).mkdir()
    (vllm,) = nightly.checkout_parts(tmp_path)
    assert vllm.arguments == ("conformance", "vllm", "--checkout", str(tmp_path / "vllm"))


def test_calls_of_operators_and_engines_have_a_night_on_a_910c(nightly, tmp_path, monkeypatch):
    parts = {
        part.arguments[0]: part
        for part in nightly.session_parts(["tests", "demo"])
        if part.name.startswith("910C")
    }
    assert set(parts) == {"tests", "demo"}
    asked = "import os, sys; print(os.environ['VNPU_SOC'], sys.argv[1])"
    monkeypatch.setattr(nightly, "nox", lambda *words: [sys.executable, "-c", asked, *words])
    for session, part in parts.items():
        logs = tmp_path / session
        assert nightly.run(part, nightly.Steps(1, logs)).is_good
        assert f"Ascend910_9391 {session}" in (logs / "step-1.log").read_text()


def test_the_summary_has_a_line_for_each_part_and_names_those_that_failed(nightly: ModuleType):
    parts = [nightly.Part(name, ("tests",), 1.0) for name in ("tests", "bench a/b")]
    outcomes = [
        nightly.Outcome(parts[0], True, "passed: 5 passed in 3.00s", 3.0),
        nightly.Outcome(parts[1], False, "FAILED", 1.0),
    ]
    lines = nightly.summary(outcomes).splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["part", "tests", "bench"]
    assert lines[-1] == "failed: bench a/b"
