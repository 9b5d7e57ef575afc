"""The device's rows in torch_npu.profiler's files, written by `msprof`."""

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from vllm_davinci.vnpu import VirtualDeviceConfig
from vllm_davinci_testing.processes.programs import run_program

# Each of two steps: a product on the default stream, exp on another stream that waits for it, a
# graph of two products, a copy to the host.
PROGRAM = """
import ctypes, torch, torch_npu
from torch_npu.profiler import ProfilerActivity, ProfilerLevel, profile, tensorboard_trace_handler

def main():
    x = torch.ones(64, 64, device="npu")
    side, graph = torch.npu.Stream(), torch.npu.NPUGraph()
    torch.npu.synchronize()
    with torch.npu.graph(graph):
        z = (x @ x) @ x
    print("streams", torch.npu.current_stream().npu_stream, side.npu_stream)
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.NPU],
        schedule=torch_npu.profiler.schedule(wait=0, warmup=0, active=2, repeat=1),
        on_trace_ready=tensorboard_trace_handler(DIRECTORY),
        experimental_config=torch_npu.profiler._ExperimentalConfig(
            profiler_level=ProfilerLevel.Level1
        ),
    ) as seen:
        for _ in range(2):
            y = x @ x
            side.wait_stream(torch.npu.current_stream())
            with torch.npu.stream(side):
                y = torch.exp(y)
            graph.replay()
            torch.npu.synchronize()
            host = y.cpu()
            seen.step()
    torch.relu(x)
    with profile(on_trace_ready=tensorboard_trace_handler(DIRECTORY + "2")):
        torch.relu(x)
        torch.npu.synchronize()
    lib = ctypes.CDLL("libascendcl.so")
    lib.aclprofCreateConfig.restype = ctypes.c_void_p
    device = (ctypes.c_uint32 * 1)(0)
    config = ctypes.c_void_p(lib.aclprofCreateConfig(device, 1, 0xFF, None, ctypes.c_uint64(1)))
    calls = [lib.aclprofStart(config), lib.aclprofInit(None, 0), lib.aclprofFinalize(),
             lib.aclprofInit(b"/proc/none", 10), lib.aclprofInit(b"/tmp", 4),
             lib.aclprofStart(config), lib.aclprofFinalize(), lib.aclprofInit(PLACE, len(PLACE)),
             lib.aclprofStart(config), lib.aclprofStart(config), lib.aclprofDestroyConfig(config),
             lib.aclprofFinalize(), lib.aclprofStop(None), lib.aclprofStop(config),
             lib.aclprofDestroyConfig(config), lib.aclprofDestroyConfig(config),
             lib.aclprofFinalize()]
    print("statuses", *(int(status == 0) for status in calls))

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the directory with the program's profiles, and its output."""
    place = tmp_path_factory.mktemp("profiles")
    program = PROGRAM.replace("DIRECTORY", repr(str(place / "first")))
    done = run_program(
        program.replace("PLACE", repr(bytes(place / "calls"))), VirtualDeviceConfig()
    )
    assert done.returncode == 0, done.stderr
    (place / "stdout").write_text(done.stdout)
    return place


def output(results: Path, name: str = "first") -> Path:
    (directory,) = results.glob(f"{name}/*/ASCEND_PROFILER_OUTPUT")
    return directory


def events(results: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((output(results) / "trace_view.json").read_text())
    return found


def table(results: Path, name: str, profile: str = "first") -> list[dict[str, str]]:
    with (output(results, profile) / name).open(newline="") as file:
        return list(csv.DictReader(file))


def hardware(results: Path) -> list[dict[str, Any]]:
    return [event for event in events(results) if "Physic Stream Id" in event.get("args", {})]


def test_no_part_of_the_analysis_fails(results: Path) -> None:
    lines = (results / "stdout").read_text().splitlines()
    assert not [line for line in lines if "[ERROR]" in line or "[WARNING]" in line]


def test_each_task_has_a_row_on_its_stream(results: Path) -> None:
    rows = hardware(results)
    operators = [row for row in rows if row["name"].startswith("aclnn")]
    assert Counter(row["name"] for row in operators) == {"aclnnMatmul": 6, "aclnnExp": 2}
    # The policy that runs tasks at once does not record waits for completed events.
    assert Counter(row["name"] for row in rows if row not in operators) >= Counter(
        EVENT_RECORD=2, MODEL_EXECUTE=2, MEMCPY_ASYNC=2
    )
    streams = {row["name"]: row["args"]["Physic Stream Id"] for row in operators}
    assert streams["aclnnExp"] != streams["aclnnMatmul"]
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events(results)
        if event["name"] == "thread_name"
    }
    for row in rows:
        assert row["tid"] == row["args"]["Physic Stream Id"]
        assert names[row["pid"], row["tid"]] == f"Stream {row['tid']}"


def test_a_row_lies_in_its_step_and_is_linked_to_the_operator_that_launched_it(results):
    steps = [event for event in events(results) if event["name"].startswith("ProfilerStep#")]
    launchers = [event for event in events(results) if event["name"] == "aten::exp"]
    begins = {float(event["ts"]) for event in launchers}
    arrows = [event for event in events(results) if event.get("cat") == "async_npu"]
    ends = {event["id"]: event for event in arrows if event["ph"] == "f"}
    linked = [
        ends[arrow["id"]] for arrow in arrows if arrow["ph"] == "s" and float(arrow["ts"]) in begins
    ]
    rows = sorted(row["ts"] for row in hardware(results) if row["name"] == "aclnnExp")
    assert sorted(end["ts"] for end in linked) == rows
    for step, row in zip(sorted(steps, key=lambda event: float(event["ts"])), rows, strict=True):
        assert 0 <= float(row) - float(step["ts"]) <= step["dur"]


def test_tables_count_the_same_launches(results: Path) -> None:
    kernels = table(results, "kernel_details.csv")
    assert Counter((row["Step Id"], row["Name"]) for row in kernels) == {
        ("0", "aclnnMatmul"): 3,
        ("0", "aclnnExp"): 1,
        ("1", "aclnnMatmul"): 3,
        ("1", "aclnnExp"): 1,
    }
    assert all(float(row["Duration(us)"]) > 0 for row in kernels)
    counts = {row["OP Type"]: row["Count"] for row in table(results, "op_statistic.csv")}
    assert counts == {"Matmul": "6", "Exp": "2"}
    steps = table(results, "step_trace_time.csv")
    assert [row["Step"] for row in steps] == ["0", "1"]
    assert all(float(row["Computing"]) > 0 for row in steps)
    assert {row["kernel_name"] for row in table(results, "task_time.csv")} >= {"aclnnExp"}


def test_a_second_profile_has_only_its_own_part(results: Path) -> None:
    names = [row["Name"] for row in table(results, "kernel_details.csv", "first2")]
    assert names == ["aclnnRelu"]


def test_calls_out_of_order_are_refused(results: Path) -> None:
    statuses = (results / "stdout").read_text().split("statuses ")[1].split()
    assert "".join(statuses) == "00010" + "0" + "11" + "10000" + "1101"
    assert list((results / "calls").glob("PROF_*/device_0/data/tasks.jsonl"))
