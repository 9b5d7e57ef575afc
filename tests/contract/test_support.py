"""The tests' pytest plugin: case selection, lanes, times, calls, interrupts."""

import datetime
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from vllm_davinci_testing.plugin import group_of
from vllm_davinci_testing.processes.programs import run_to_end
from vllm_davinci_testing.selection import GROUPS, group_of_the_day

AT_NIGHT = pytest.mark.nightly("planning")


def test_every_group_of_nightly_cases_has_its_days():
    days = [datetime.date(2026, 11, 1) + datetime.timedelta(n) for n in range(len(GROUPS))]
    assert {group_of_the_day(day) for day in days} == set(GROUPS)


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


def pytest_command(directory: Path) -> list[str]:
    (directory / "pytest.ini").write_text("[pytest]\nmarkers =\n thorough\n nightly(group)\n")
    plugins = ("vllm_davinci_testing.plugin", "no:cacheprovider")
    return [sys.executable, "-m", "pytest", *(f"-p{name}" for name in plugins)]


def run_pytest(directory: Path, source: str, *command: str) -> subprocess.CompletedProcess[str]:
    (directory / "test_it.py").write_text(textwrap.dedent(source))
    return run_to_end([*command, *pytest_command(directory), str(directory)], cwd=directory)


@AT_NIGHT
def test_children_of_tests_can_be_interrupted_where_pytest_was_started_with_interrupts_ignored(
    tmp_path: Path,
):
    """Starts pytest like `nohup pytest &`."""
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


KINDS_OF_CASES = """
    import pytest

    @pytest.mark.thorough
    @pytest.mark.parametrize("n", range(120))
    def test_grid(n):
        pass

    @pytest.mark.nightly("hosts")
    @pytest.mark.parametrize("n", range(2))
    def test_hosts(n):
        pass

    @pytest.mark.nightly("faults")
    def test_fault():
        pass

    def test_plain():
        pass
    """


@pytest.mark.parametrize(
    ("options", "counts", "listed"),
    [
        pytest.param(
            "",
            "1 passed, 123 deselected",
            ["120 thorough", "2 hosts", "1 faults"],
            marks=pytest.mark.nightly("planning"),
        ),
        ("--group=hosts", "2 passed, 122 deselected", ["120 thorough", "1 faults", "1 daily"]),
        pytest.param("--all", "124 passed", [], marks=AT_NIGHT),
        pytest.param(
            "-mthorough", "120 passed, 4 deselected", [], marks=pytest.mark.nightly("planning")
        ),
        (
            "--lanes=2 --lanes-import=json",
            "1 passed, 123 deselected",
            ["120 thorough", "2 hosts", "1 faults"],
        ),
    ],
)
def test_cases_are_chosen_by_their_marks_and_the_others_listed(options, counts, listed, tmp_path):
    done = run_pytest(tmp_path, KINDS_OF_CASES, "env", f"PYTEST_ADDOPTS={options}")
    assert done.returncode == 0, done.stdout
    assert counts in done.stdout
    left_out = done.stdout.partition("cases left out")[2]
    assert [row for row in listed if f" {row}" not in left_out] == []
    assert bool(left_out) == bool(listed)


@AT_NIGHT
def test_an_unknown_group_ends_the_run(tmp_path: Path):
    done = run_pytest(tmp_path, KINDS_OF_CASES.replace("hosts", "hots"))
    assert done.returncode != 0
    assert "nightly('hots',) names no group; there are planning, hosts" in done.stderr + done.stdout


def test_a_lane_of_several_folders_has_the_fixtures_of_each(tmp_path: Path):
    for name in ("one", "two"):
        (folder := tmp_path / name).mkdir()
        (folder / "conftest.py").write_text(
            f"import pytest\n\n@pytest.fixture\ndef of_{name}(): pass\n"
        )
        (folder / f"test_{name}.py").write_text(f"def test_it(of_{name}): pass\n")
    options = "PYTEST_ADDOPTS=--lanes=1 --lanes-import=json one two"
    done = run_pytest(tmp_path, "", "env", options)
    assert "2 passed" in done.stdout, done.stdout


def test_lanes_report_as_one_process_does_and_survive_a_crash(tmp_path: Path):
    (tmp_path / "test_crash.py").write_text(
        "import os\n\ndef test_before(): pass\n\ndef test_crash(): os._exit(3)\n\n"
        "def test_after(): pass\n"
    )
    (tmp_path / "test_broken.py").write_text("import no_such_module\n")
    # One lane has two of a folder's three files; each finds the fixtures of its conftest.
    (folder := tmp_path / "folder").mkdir()
    (folder / "conftest.py").write_text(
        "import pytest\n\n@pytest.fixture\ndef shared():\n    return 7\n"
    )
    for name in ("one", "two", "three"):
        (folder / f"test_{name}.py").write_text("def test_it(shared): pass\n")
    source = """
        import multiprocessing, os, warnings
        import pytest
        from vllm_davinci_testing.processes.fork_server import fork_context

        @pytest.fixture(scope="session")
        def session():
            yield os.getpid()
            open("torn_down", "a").write("x")

        def test_passes(session):
            warnings.warn("told once")

        def test_fails(session):
            print("printed before")
            assert session == 0

        def test_forks():
            burn = "import time\\nwhile time.process_time() < 1: pass"
            process = fork_context().Process(target=exec, args=(burn,))
            process.start()
            process.join(60)
            assert process.exitcode == 0
        """
    done = run_pytest(
        tmp_path, source, "env", "PYTEST_ADDOPTS=--lanes=2 --lanes-import=json --durations=1"
    )
    assert "2 failed, 7 passed, 1 warning, 1 error" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 1
    assert "The process of its lane ended meanwhile, with status 3." in done.stdout
    assert "test_crash.py::test_crash" in done.stdout.split("short test summary")[1]
    assert "printed before" in done.stdout and "told once" in done.stdout
    assert "No module named 'no_such_module'" in done.stdout
    assert "call     test_it.py::test_forks" in done.stdout.partition("slowest")[2]
    assert (tmp_path / "torn_down").read_text() == "x"
    files = json.loads((tmp_path / "results" / "test_times.json").read_text())["files"]
    assert files["test_it.py"]["cases"] == 3
    assert files["test_it.py"]["processor_s"] > 0.5  # mostly the fork's


@AT_NIGHT
def test_an_interrupt_ends_lanes_with_what_has_passed_and_the_status_of_an_interrupt(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import time\nfrom pathlib import Path\n\ndef test_passes(): pass\n\n"
        "def test_waits():\n    Path('waits').touch()\n    time.sleep(100)\n"
    )
    command = [*pytest_command(tmp_path), "--lanes=2", "--lanes-import=json", str(tmp_path)]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    begin = time.monotonic()
    while not (tmp_path / "waits").exists():
        assert time.monotonic() - begin < 100
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # like a terminal
    printed, _ = process.communicate(timeout=100)
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    assert "KeyboardInterrupt" in printed and "1 passed" in printed, printed


@AT_NIGHT
def test_recorded_times_are_of_the_files_that_ran_and_are_there(tmp_path: Path):
    (tmp_path / "tests").mkdir()
    kept = {"test_it.py": 2.0, "test_gone.py": 3.0}
    (tmp_path / "tests" / "times.json").write_text(json.dumps({"daily": kept, "all": kept}))
    source = """
        import time

        def test_burns():
            end = time.process_time() + 1.2
            while time.process_time() < end:
                pass
        """
    done = run_pytest(tmp_path, source, "env", "PYTEST_ADDOPTS=--record-times")
    assert done.returncode == 0, done.stdout
    recorded = json.loads((tmp_path / "tests" / "times.json").read_text())
    assert list(recorded["daily"]) == ["test_it.py"]
    assert 1.2 <= recorded["daily"]["test_it.py"] < 2.0
    assert recorded["all"] == kept
    assert recorded["processor"]


def test_serving_calls_only_operators_with_rules(tmp_path: Path):
    """The calling code has the path of a module of core."""
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
    assert "aclnnInplaceErfinv has no rules to check its calls" in done.stdout
    assert "1 operators without rules called by what is served" in done.stdout


@AT_NIGHT
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


@AT_NIGHT
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
