"""Traces of one or several processes have each task's stream and time."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from vllm_davinci.vnpu import TraceError, VirtualDeviceConfig, timeline
from vllm_davinci.vnpu.activate import prepare_environment
from vllm_davinci_testing.processes.forked import run_to_exit
from vllm_davinci_testing.processes.programs import run_to_end

# A product on a side stream that waits for one on the current stream.
TWO_STREAMS = """
import torch
from vllm_davinci.vnpu import label_launches, name_stream
side = torch.Stream(torch.device("npu:0"))
name_stream(side.native_handle, "side")
x = torch.ones(256, 256, device="npu")
torch.npu.synchronize()
label_launches("first half")
y = x @ x
event = torch.Event("npu")
event.record()
side.wait_event(event)
label_launches("")
with torch.npu.stream(side):
    z = y @ y
torch.npu.synchronize()
"""
PACE = "aclnnMatmul=400000/MiB"  # a quarter of a MiB takes 100 ms


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("trace")
    config = VirtualDeviceConfig(schedule="threads", trace=str(directory))
    done = run_to_exit(TWO_STREAMS, config, VNPU_PACE=PACE)
    assert done.status == 0, done.stderr
    return directory


def named(trace: timeline.Timeline, name: str) -> list[timeline.Task]:
    return [task for task in trace.tasks if task.name == name]


def test_a_task_has_its_stream_bytes_label_and_artificial_duration(traced: pathlib.Path) -> None:
    trace = timeline.read([traced])
    first, second = named(trace, "aclnnMatmul")
    assert (trace.role(first), trace.role(second)) == ("", "side")
    assert (first.label, second.label) == ("first half", "")
    assert first.bytes_read == 2 * first.bytes_written == 2 * 256 * 256 * 4
    assert first.end - first.begin >= 100_000
    assert first.launched <= first.begin
    assert first.end <= second.begin
    (clock,) = trace.clocks
    assert f"artificial durations: VNPU_PACE={PACE}" in clock


def test_a_wait_lasts_until_the_awaited_task_ends(traced: pathlib.Path) -> None:
    trace = timeline.read([traced])
    first, second = named(trace, "aclnnMatmul")
    (wait,) = named(trace, "event wait")
    assert wait.stream == second.stream != first.stream
    assert wait.begin < first.end <= wait.end <= second.begin
    # The wait is busy only while it starts and wakes up, not for all of its 100 ms.
    assert wait.busy[1] - wait.busy[0] < 50_000


def test_arrows_go_from_each_record_to_its_wait(traced: pathlib.Path) -> None:
    (file,) = traced.iterdir()
    events = json.loads(file.read_text())  # a process that ends normally leaves strict JSON
    (wait,) = [event for event in events if event["name"] == "event wait"]
    (end,) = [event for event in events if event["ph"] == "f"]
    begins = [event for event in events if event["ph"] == "s" and event["id"] == end["id"]]
    assert end["tid"] == wait["tid"]
    assert [event["tid"] for event in begins] != [end["tid"]]
    assert begins


@pytest.mark.nightly("operators")
def test_files_of_several_processes_become_one_that_begins_at_zero(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "all.json"
    code = (
        "import os, subprocess, sys\n"
        "if len(sys.argv) == 1: subprocess.run([sys.executable, __file__, 'child'], check=True)\n"
        "import torch\n"
        "torch.ones(8, device='npu').sum().item()\n"
    )
    program = tmp_path / "program.py"
    program.write_text(code)
    vnpu = [sys.executable, "-m", "vllm_davinci.vnpu"]
    command = [*vnpu, "run", "--trace", str(file), "--", sys.executable, str(program)]
    subprocess.run(command, check=True, timeout=120)
    trace = timeline.read([file])
    assert len(trace.processes) == 2
    assert all(str(program) in name for name in trace.processes.values())
    assert min(task.begin for task in trace.tasks) == 0
    assert {task.process for task in trace.tasks} == set(trace.processes)
    assert json.loads(file.read_text())["otherData"]["clock"] == "the host's wall clock"
    assert {path.name for path in tmp_path.iterdir()} == {"all.json", "program.py"}


def test_output_of_a_killed_process_is_kept(tmp_path: pathlib.Path) -> None:
    code = TWO_STREAMS + "import sys, time\nprint('ran', flush=True)\ntime.sleep(100)\n"
    environment = dict(os.environ)
    prepare_environment(environment, VirtualDeviceConfig(trace=str(tmp_path)))
    child = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    child.stdout.readline()
    for _ in range(100):
        if list(tmp_path.iterdir()):
            break
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.1)
    child.send_signal(signal.SIGKILL)
    child.wait(10)
    child.stdout.close()
    (file,) = tmp_path.iterdir()
    with file.open("a") as end:
        end.write(',\n{"ph":"X","pi')  # the file is cut off
    assert named(timeline.read([tmp_path]), "aclnnMatmul")


def test_the_status_of_a_traced_command_is_the_commands(tmp_path: pathlib.Path) -> None:
    vnpu = [sys.executable, "-m", "vllm_davinci.vnpu", "run", "--trace", str(tmp_path / "t.json")]
    done = run_to_end([*vnpu, "--", sys.executable, "-c", "raise SystemExit(7)"], 60)
    assert done.returncode == 7
    assert "no process ran a task" in done.stderr


def test_a_directory_that_cannot_be_written_is_named(tmp_path: pathlib.Path) -> None:
    missing = tmp_path / "missing"
    done = run_to_exit(TWO_STREAMS, VirtualDeviceConfig(trace=str(missing)))
    assert done.status != 0
    assert f"VNPU_TRACE='{missing}'" in done.stderr


def test_an_invalid_trace_is_named(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "other.json"
    file.write_text('{"a": 1}\n{"b": 2}\n')
    with pytest.raises(TraceError, match=r"other\.json, line 1"):
        timeline.read([file])
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(TraceError, match="vnpu run --trace FILE"):
        timeline.merge([empty], tmp_path / "out.json")
