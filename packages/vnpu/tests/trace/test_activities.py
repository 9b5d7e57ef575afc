"""The device's rows in torch's profiler, through libmspti."""

import json
from collections import Counter
from typing import Any

import pytest

from vllm_davinci.vnpu import VirtualDeviceConfig
from vllm_davinci_testing.processes.programs import run_program

# Three products; two are in a graph that is replayed twice on its own stream.
PROGRAM = """
import sys, torch
from torch.profiler import ProfilerActivity, profile, record_function
x = torch.ones(64, 64, device="npu")
stream, graph = torch.npu.Stream(), torch.npu.NPUGraph()
torch.npu.synchronize()
with torch.npu.graph(graph):
    y = (x @ x) @ x
x @ x
torch.npu.synchronize()
with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]) as seen:
    z = x @ x
    graph.replay()
    graph.replay()
    with torch.npu.stream(stream):
        z = torch.exp(x)
    torch.npu.synchronize()
x @ x
torch.npu.synchronize()
seen.export_chrome_trace(sys.argv[1])
"""


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("profile") / "trace.json"
    program = f"import sys; sys.argv = ['', {str(path)!r}]" + PROGRAM
    done = run_program(program, VirtualDeviceConfig())
    assert done.returncode == 0, done.stderr
    assert "RecordFunction" not in done.stderr
    found: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return found


def kernels(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event.get("cat") == "kernel"]


def test_each_profiled_operator_has_a_row_also_in_replays(events):
    names = Counter(event["name"] for event in kernels(events))
    assert names == {"aclnnMatmul": 5, "aclnnExp": 1}


def test_a_row_has_its_stream_and_its_time_inside_of_the_trace(events):
    host = [event for event in events if event.get("name") == "aten::matmul"]
    begin = min(event["ts"] for event in host)
    rows = kernels(events)
    assert all(event["ts"] >= begin and event["dur"] > 0 for event in rows)
    (exp,) = (event for event in rows if event["name"] == "aclnnExp")
    assert exp["args"]["streamId"] not in {
        event["args"]["streamId"] for event in rows if event is not exp
    }


def test_a_row_is_linked_to_the_operator_that_launched_it(events: list[dict[str, Any]]) -> None:
    begins = {event["id"]: event for event in events if event.get("ph") == "s"}
    ends = [event for event in events if event.get("ph") == "f" and event["id"] in begins]
    (exp,) = (event for event in kernels(events) if event["name"] == "aclnnExp")
    assert exp["ts"] in {event["ts"] for event in ends}


# A client requests a kind that the virtual NPU does not record, and passes a missing object.
CLIENT = """
import ctypes
lib = ctypes.CDLL("libmspti.so")
handle, other, last = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64()
print(lib.msptiSubscribe(ctypes.byref(handle), None, None),
      lib.msptiSubscribe(ctypes.byref(other), None, None),
      lib.msptiUnsubscribe(None), lib.msptiUnsubscribe(handle), lib.msptiUnsubscribe(handle))
print(lib.msptiActivityEnable(6), lib.msptiActivityEnable(2),
      lib.msptiActivityRegisterCallbacks(None, None))
print(lib.msptiActivityPushExternalCorrelationId(2, ctypes.c_uint64(7)),
      lib.msptiActivityPopExternalCorrelationId(2, ctypes.byref(last)), last.value,
      lib.msptiActivityPopExternalCorrelationId(2, None))
"""


def test_an_impossible_request_is_answered_with_its_status() -> None:
    done = run_program(CLIENT, VirtualDeviceConfig())
    assert done.returncode == 0, done.stderr
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["0", "2", "1", "0", "1"],
        ["8", "0", "1"],
        ["0", "0", "7", "5"],
    ]
