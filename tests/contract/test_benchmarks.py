"""The benchmark harness: records, files and comparison."""

import io
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from rich.console import Console

from vllm_davinci.vnpu import TraceError
from vllm_davinci.vnpu.timeline import Task, Timeline
from vllm_davinci_testing.processes.programs import run_to_end

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def write(path: Path, tokens_per_second: float, seed: int = 0) -> Path:
    result = import_module("result")
    row = result.Row(
        "throughput", "tokens/s", tokens_per_second, result.Kind.MEASURED, baseline=1000.0
    )
    record = result.Result(
        "npu", "cpu", [row], settings={"batch": 4}, seed=seed, benchmark="serving/x"
    )
    path.write_text(json.dumps(record.to_json()))
    return path


def run(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run_to_end([sys.executable, str(BENCHMARKS / script), *map(str, arguments)], 60)


def test_a_record_holds_both_sides_their_ratio_versions_settings_and_seed(tmp_path: Path):
    record = json.loads(write(tmp_path / "a.json", 1500.0, seed=7).read_text())
    (row,) = record["rows"]
    assert (row["ours"], row["baseline"], row["ratio"]) == (1500.0, 1000.0, 1.5)
    assert row["kind"] == "measured"
    assert record["seed"] == 7
    assert record["settings"] == {"batch": 4}
    assert record["versions"]["torch"].startswith("2.13.0")


def test_a_goal_is_for_the_ratio_and_without_a_baseline_for_the_value():
    result = import_module("result")
    fast = result.Row("rate", "1/s", 50.0, result.Kind.MEASURED, baseline=40.0, at_least=1.5)
    assert fast.is_met is False
    low = result.Row("peak", "bytes", 50, result.Kind.MEASURED, at_most=60)
    assert low.is_met is True
    assert result.Row("count", "launches", 3, result.Kind.COUNTED).is_met is None


def test_two_results_are_compared_row_by_row(tmp_path: Path):
    done = run("compare.py", write(tmp_path / "a.json", 1000.0), write(tmp_path / "b.json", 1250.0))
    assert done.returncode == 0, done.stderr
    assert "+25.0%" in done.stdout


def test_an_invalid_result_file_is_refused_by_name(tmp_path: Path):
    (tmp_path / "b.json").write_text("{}")
    done = run("compare.py", write(tmp_path / "a.json", 1.0), tmp_path / "b.json")
    assert done.returncode == 2
    assert "b.json is not a result" in done.stderr


def test_an_unknown_benchmark_is_an_error_that_says_where_the_names_are():
    done = run("run.py", "no_group/no_benchmark")
    assert done.returncode == 2
    assert "no benchmark 'no_group/no_benchmark'" in done.stderr


def test_every_benchmark_has_arguments_and_a_docstring():
    for path in sorted(BENCHMARKS.glob("*/[!_]*.py")):
        text = path.read_text(encoding="utf-8")
        if "\ndef run(" in text:
            assert "\ndef add_arguments(" in text, path
            assert text.startswith('"""'), path


def test_the_hidden_share_and_the_bound_of_a_step_come_from_its_trace():
    """Each of two halves computes twice for 10 us and communicates twice for 8 us."""
    step_trace = import_module("multistream.step_trace")

    def task(name: str, category: str, half: int, begin: float, end: float, waited: float = 0.0):
        return Task(1, 0, name, category, begin, end, 1.0, waited, label=f"ubatch {half}")

    timeline = Timeline(
        [
            task("aclnnMm", "operator", 0, 10, 20),
            task("all_reduce", "collective", 0, 20, 28),
            task("aclnnMm", "operator", 1, 20, 30),
            task("all_reduce", "collective", 1, 30, 38),
            task("event wait", "event", 0, 30, 36, 6),
            task("aclnnMm", "operator", 0, 30, 40),
            task("all_reduce", "collective", 0, 39, 50, 3),  # waits 3 us for the other rank
            Task(2, 0, "all_reduce", "collective", 0, 99, 1.0, 0.0),  # the other rank's
        ]
    )
    (step,) = step_trace.steps_of(timeline, [(0.0, 60.0)])
    # 8 of the first half's 16 us of communication overlap the second half's computation.
    assert step.hidden_share() == pytest.approx(8 / 10)
    # The split part lasts from 20 to 50; it has 20 us of computation and 24 us of communication.
    assert step.unsplit() == 20 + 10
    assert step.bound() == 24 + 30


def test_a_trace_without_labels_gives_an_error_and_no_hidden_share():
    step_trace = import_module("multistream.step_trace")
    tasks = [
        Task(1, 0, "aclnnMm", "operator", 0, 10, 1.0, 0.0),
        Task(1, 1, "all_reduce", "collective", 10, 18, 1.0, 0.0),
    ]
    (step,) = step_trace.steps_of(Timeline(tasks), [(0.0, 20.0)])
    with pytest.raises(TraceError, match=r"0 collectives with the label .*2 tasks are \[''\]"):
        step.hidden_share()


LONG_NAME = "dp_ranks: first half's communication under second half's computation"


def test_a_table_of_80_columns_cuts_no_figure_and_no_name():
    result = import_module("result")
    wide = result.Row(
        LONG_NAME,
        "share of the smaller",
        1_231_233.3,
        result.Kind.MEASURED,
        baseline=123_456.7,
        bound=12_345.6,
        at_least=0.85,
        quartiles=(123_456.7, 1_234_567.8),
    )
    record = result.Result("ours", "baseline", [wide], benchmark="group/name")
    output = io.StringIO()
    console = Console(file=output, width=80)
    import_module("result_table").print_result(record, console)
    lines = output.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    words = output.getvalue().split()
    for figure in ("1,231,233.3", "123,456.7", "9.973", "12,345.6", "0.85", "met"):
        assert figure in words, figure
    for word in LONG_NAME.split():
        assert word in words, word


def test_a_comparison_of_80_columns_cuts_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    sides = [write(tmp_path / f"{n}.json", n) for n in (1_231_233.3, 2_345_678.9)]
    done = run("compare.py", *sides)
    for figure in ("1,231,233.3", "2,345,678.9", "+90.5%", "1,231.2", "2,345.7"):
        assert figure in done.stdout.split(), done.stdout


def test_published_figures_are_reported_with_sign_and_limits():
    table = import_module("published.page_table")
    without = "without the wait for the last rank"
    compared = [
        table.Compared("faster", "x", 1.2, {"": 1.44, without: 1.28}, (1.4, 1.5), True, goal=1.45),
        table.Compared("slower", "x", 1.1, {"": 0.98, without: 0.97}, (0.9, 0.99), is_ratio=True),
        table.Compared("either", "x", 1.1, {"": 1.02}, (0.98, 1.04), is_ratio=True),
        table.Compared("step", "ms", 50.0, {"": 59.0, without: 61.0}, (58.0, 60.0)),
        table.Compared("host", "ms", 50.0, {"": 20.0}, (19.0, 51.0), taken="910B2"),
        table.Compared("ours", "of the time", None, {"": 0.9}, (0.88, 0.94), goal=-0.95),
    ]
    assert [each.is_within for each in compared[:5]] == [False, False, False, True, True]
    assert [each.sign for each in compared] == ["right", "**wrong**", "**both**", "", "", ""]
    assert [each.meets_goal for each in (compared[0], compared[-1])] == [False, True]
    page = table.page_of(compared, "a machine")
    assert "| faster | 1.2 x | 1.44 | 1.4 to 1.5 | +20.0% | **no** | right |  |" in page
    assert "| faster | +20.0% | +6.7% |" in page
    assert "| ours | at most 0.95 of the time | 0.9 | 0.88 to 0.94 | met |" in page
    assert "2 of 5 are within limits; of 3 ratios 1 have the right sign" in page
