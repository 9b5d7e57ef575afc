"""Events used outside a graph, and graphs as files."""

import json
from pathlib import Path

import pytest

from vllm_davinci.vnpu import VirtualDeviceConfig
from vllm_davinci_testing.processes.programs import output_of

pytestmark = pytest.mark.nightly("operators")

INVALID, NOT_CAPTURING = "107000", "107029"

PREAMBLE = """
import ctypes, torch, torch_npu
from ctypes import byref, c_size_t, c_uint32, c_void_p
torch.npu.set_device(0)
acl = ctypes.CDLL("libascendcl.so")

def call(name, *arguments):
    status = getattr(acl, name)(*arguments)
    assert status == 0, (name, status)

def made(name, *arguments):
    handle = c_void_p()
    call(name, byref(handle), *arguments)
    return handle

def stream(flags=4):
    return made("aclrtCreateStreamWithConfig", c_uint32(0), c_uint32(flags))

def copy(target, source, on):
    call("aclrtMemcpyAsync", c_void_p(target.data_ptr()), c_size_t(target.nbytes),
         c_void_p(source.data_ptr()), c_size_t(target.nbytes), 3, on)

zeros = torch.zeros(4, device="npu")
values = [torch.full((4,), float(i), device="npu") for i in range(4)]
outs = [torch.zeros(4, device="npu") for _ in range(4)]
torch.npu.synchronize()
plain = stream(0)
"""
EXTERNAL = (
    PREAMBLE
    + """
def captured(on, *steps):
    call("aclmdlRICaptureBegin", on, 2)
    for step in steps: step()
    return end(on)

def end(on):
    graph = c_void_p()
    call("aclmdlRICaptureEnd", on, byref(graph))
    return graph

def event(flags=1):
    return made("aclrtCreateEventExWithFlag", c_uint32(flags))

one, two, passed = stream(0), stream(0), event()
writes = captured(one, lambda: copy(outs[0], values[3], one),
                  lambda: call("aclrtRecordEventWithFlag", passed, one, 1))
reads = captured(two, lambda: call("aclrtStreamWaitEventWithFlag", two, passed, 0, 1),
                 lambda: copy(outs[1], outs[0], two))
"""
)


@pytest.mark.parametrize("seed", range(6))
def test_a_graph_waits_for_an_event_that_another_records(seed: int) -> None:
    """Without the wait, some of these orders would read first."""
    lines = output_of(
        EXTERNAL
        + """
call("aclmdlRIExecuteAsync", writes, one)
call("aclmdlRIExecuteAsync", reads, two)
call("aclrtSynchronizeStream", two)
print(float(outs[1][0].cpu()))
""",
        VirtualDeviceConfig(schedule=f"fuzz:{seed}"),
    )
    assert lines == ["3.0"]


def test_events_beyond_a_graph_refuse_what_their_pages_exclude() -> None:
    lines = output_of(
        EXTERNAL
        + """
fresh, timed = event(), event(8)
record, wait = acl.aclrtRecordEventWithFlag, acl.aclrtStreamWaitEventWithFlag
print(record(fresh, one, 1), wait(two, event(), 0, 1))
print(record(passed, one, 0), record(event(), one, 2))
print(record(event(), one, 0), wait(two, event(), 0, 0))
print(wait(two, event(), 1, 1))
call("aclmdlRICaptureBegin", one, 2)
twice = event()
print([record(each, one, 1) for each in (twice, twice, timed)])
"""
    )
    assert lines == [
        f"{NOT_CAPTURING} {NOT_CAPTURING}",
        f"{INVALID} {INVALID}",
        "0 0",
        INVALID,
        f"[0, {INVALID}, {INVALID}]",
    ]


def test_a_graph_is_written_as_a_file_of_its_tasks(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    lines = output_of(
        EXTERNAL
        + f"""
print(acl.aclmdlRIDebugJsonPrint(writes, {str(path).encode()!r}, 0))
print(acl.aclmdlRIDebugJsonPrint(writes, b"/absent/graph.json", 0),
      acl.aclmdlRIDebugJsonPrint(writes, None, 0))
"""
    )
    assert lines == ["0", f"{INVALID} {INVALID}"]
    (task,) = json.loads(path.read_text())
    assert (task["name"], task["ph"], task["args"]["Task ID"]) == ("memory copy", "X", 0)
    assert set(task["args"]) == {"Model ID", "Stream ID", "Task ID", "Task Type"}
