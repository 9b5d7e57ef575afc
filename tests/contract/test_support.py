"""The promises of the tests' plugin and of the nightly run: a sample, interrupts, summaries."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from vllm_davinci_testing.plugin import group_of
from vllm_davinci_testing.sample import CASES_PER_SAMPLED_CASE, sampled

GRID = [f"tests/e2e/test_exactness.py::test_every_shape[{n}]" for n in range(120)]
DAYS = [f"2026-{month:02}-{day:02}" for month in range(1, 13) for day in range(1, 29)]


def test_a_day_s_sample_is_small_and_repeats_and_other_days_have_other_cases():
    assert len(sampled(GRID, DAYS[0])) == len(GRID) // CASES_PER_SAMPLED_CASE
    assert sampled(GRID, DAYS[0]) == sampled(reversed(GRID), DAYS[0])
    assert sampled(GRID, DAYS[0]) != sampled(GRID, DAYS[1])
    assert set().union(*(sampled(GRID, day) for day in DAYS)) == set(GRID)


def test_a_small_grid_has_its_turn_on_some_days():
    days = sum(bool(sampled(GRID[:3], day)) for day in DAYS)
    assert 0.5 < days / len(DAYS) / (3 / CASES_PER_SAMPLED_CASE) < 1.5


@pytest.mark.parametrize(
    ("node_id", "group"),
    [
        ("packages/core/tests/config/test_dbo.py::test_x[1::2]", "packages/core"),
        ("tests/e2e/test_serve.py::test_x", "tests/e2e"),
        ("checkpoints/tests/test_checkpoints.py::test_x", "checkpoints"),
    ],
)
def test_times_are_summed_by_package_and_folder(node_id: str, group: str):
    assert group_of(node_id) == group


def run_pytest(directory: Path, source: str, *command: str) -> subprocess.CompletedProcess[str]:
    (directory / "pytest.ini").write_text("[pytest]\nmarkers = thorough\n")
    (directory / "test_it.py").write_text(textwrap.dedent(source))
    pytest_command = [sys.executable, "-m", "pytest", "-p", "vllm_davinci_testing.plugin"]
    return subprocess.run(
        [*command, *pytest_command, "-p", "no:cacheprovider", str(directory)],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_children_of_tests_can_be_interrupted_where_pytest_was_started_with_interrupts_ignored(
    tmp_path: Path,
):
    """As `nohup pytest &` is."""
    done = run_pytest(
        tmp_path,
        """
        import signal, subprocess, sys

        def test_a_child_ends_by_an_interrupt():
            code = "import time; print('ready', flush=True); time.sleep(60)"
            child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
            assert child.stdout.readline() == b"ready\\n"
            child.send_signal(signal.SIGINT)
            assert child.wait(20) in (1, 130, -signal.SIGINT)
        """,
        "sh",
        "-c",
        'trap "" INT; exec "$@"',
        "sh",
    )
    assert done.returncode == 0, done.stdout


def test_the_run_names_the_date_of_its_sample_and_the_sampled_cases(tmp_path: Path):
    done = run_pytest(
        tmp_path,
        """
        import pytest

        @pytest.mark.thorough
        @pytest.mark.parametrize("n", range(120))
        def test_grid(n):
            pass

        def test_plain():
            pass
        """,
        "env",
        "PYTEST_ADDOPTS=--sample-date=2026-01-02",
    )
    assert done.returncode == 0, done.stdout
    assert "3 passed, 118 deselected" in done.stdout
    _, listed = done.stdout.split("thorough cases of --sample-date=2026-01-02")
    assert listed.count("::test_grid[") == 2


def test_what_is_served_calls_no_operator_without_rules(tmp_path: Path):
    """Here it is a module at a place like that of core's."""
    served = tmp_path / "vllm_davinci" / "core" / "served.py"
    served.parent.mkdir(parents=True)
    served.write_text("def call(tensor):\n    tensor.erfinv_()\n")
    program = """
        import runpy, torch

        call = runpy.run_path(FOLDER + "/vllm_davinci/core/served.py")["call"]

        def test_of_its_own():
            torch.ones(2, device="npu").erfinv_()

        def test_served():
            call(torch.ones(2, device="npu"))
        """
    done = run_pytest(tmp_path, program.replace("FOLDER", repr(str(tmp_path))))
    assert "test_served" in done.stdout.split("short test summary")[1], done.stdout
    assert "1 error" in done.stdout and "2 passed" in done.stdout
    assert "aclnnInplaceErfinv has no rules that its calls are held against" in done.stdout
    assert "1 operators without rules called by what is served" in done.stdout


def test_an_error_of_one_test_is_not_taken_for_one_of_the_next(tmp_path: Path):
    done = run_pytest(
        tmp_path,
        """
        import ctypes
        import pytest, torch, torch_npu

        pytestmark = pytest.mark.refused_calls

        def test_leaves_an_error():
            event, stream = ctypes.c_void_p(), torch.npu.current_stream().npu_stream
            acl = ctypes.CDLL("libascendcl.so")
            acl.aclrtCreateEventExWithFlag(ctypes.byref(event), 8)  # only marks time
            assert acl.aclrtStreamWaitEvent(ctypes.c_void_p(stream), event) == 207000

        def test_is_told_its_own():
            with pytest.raises(RuntimeError, match="gamma .* must have the trailing sizes of x"):
                torch_npu.npu_rms_norm(torch.ones(2, 8).npu(), torch.ones(4).npu(), 1e-6)
        """,
        "env",
        "VNPU_SOC=Ascend910B3",
    )
    assert "2 passed" in done.stdout, done.stdout


def test_a_run_keeps_to_the_instruction_sets_of_an_older_processor(tmp_path: Path):
    done = run_pytest(
        tmp_path,
        """
        import torch

        def test_capability():
            assert torch.backends.cpu.get_cpu_capability() == "DEFAULT"
        """,
        "env",
        "PYTEST_ADDOPTS=--processor=sse4",
    )
    assert done.returncode == 0, done.stdout
    assert "with the instruction sets of sse4" in done.stdout


@pytest.fixture
def nightly(repository: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(repository / "ci"))
    return import_module("nightly")


def row(kind: str, ratio: float) -> dict[str, object]:
    return {
        "name": "rate", "unit": "1/s", "ours": 3.0, "ratio": ratio, "kind": kind,
        "at_least": 1.0, "at_most": None, "is_met": ratio >= 1.0,
    }  # fmt: skip


def test_a_missed_goal_is_shown_and_only_that_of_an_exact_figure_fails_the_night(
    nightly: ModuleType,
):
    is_good, text = nightly.goals_of({"rows": [row("measured", 0.5), row("counted", 2.0)]}, {})
    assert is_good
    assert "1 of 2 goals met" in text
    assert "MISSED: rate 0.5 x, goal >= 1 (measured)" in text
    assert not nightly.goals_of({"rows": [row("counted", 0.5)]}, {})[0]


def test_a_goal_that_is_known_to_be_missed_fails_the_night_only_when_its_figure_changes(
    nightly: ModuleType,
):
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
        assert f"no longer missed, take out of known_misses.toml: {next(iter(known))}" in text


def test_what_is_known_to_be_missed_is_a_goal_of_a_benchmark(nightly: ModuleType, repository: Path):
    misses = nightly.read_toml(nightly.KNOWN_MISSES)["miss"]
    for miss in misses:
        assert (repository / "benchmarks" / f"{miss['benchmark']}.py").exists()
        assert set(miss) == {"benchmark", "row", "value", "why"}
    assert nightly.known_misses("published/deepseek_r1_w8a8")["communication in serial prefill"]


def test_suites_run_at_night_where_their_checkouts_lie(nightly: ModuleType, tmp_path: Path):
    assert nightly.checkout_parts(tmp_path) == []
    for folder in ("vllm", "another"):
        (tmp_path / folder).mkdir()
    (vllm,) = nightly.checkout_parts(tmp_path)
    assert vllm.arguments == ("conformance", "vllm", "--checkout", str(tmp_path / "vllm"))


def test_calls_of_operators_and_engines_have_a_night_on_a_910c(
    nightly: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
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
    assert lines[-1] == "not as they should be: bench a/b"
