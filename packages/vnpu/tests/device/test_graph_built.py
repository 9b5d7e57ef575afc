"""Graphs built from streams, labels, events beyond a graph, graphs as files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_davinci.vnpu import VirtualDeviceConfig
from vllm_davinci_testing.processes.programs import output_of

INVALID, HANDLE, NOT_CAPTURING, CAPTURING = "107000", "107017", "107029", "107027"

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
BUILT = (
    PREAMBLE
    + """
choice = torch.zeros(1, dtype=torch.int32, device="npu")
first, second = stream(), stream()
labels = (c_void_p * 3)(*[made("aclrtCreateLabel") for _ in range(3)])
listed = c_void_p()
call("aclrtCreateLabelList", labels, c_size_t(3), byref(listed))
model = made("aclmdlRIBuildBegin", 0)
call("aclmdlRIBindStream", model, first, 0)
call("aclmdlRIBindStream", model, second, 0x7FFFFFFF)
# switch; [0] out0; [1] out1 on the first stream, [2] out2, on the second
call("aclrtSwitchLabelByIndex", c_void_p(choice.data_ptr()), 3, listed, first)
for number, on in ((0, first), (1, first), (2, second)):
    call("aclrtSetLabel", c_void_p(labels[number]), on)
    copy(outs[number], values[number + 1], on)
for on in (first, second):
    call("aclmdlRIEndTask", model, on)
torch.npu.synchronize()
print(float(outs[0].sum()))
call("aclmdlRIBuildEnd", model, None)

def run(index):
    choice.fill_(index)
    for out in outs: out.zero_()
    torch.npu.synchronize()
    call("aclmdlRIExecuteAsync", model, plain)
    call("aclrtSynchronizeStream", plain)
    return [float(out[0].cpu()) for out in outs[:3]]
"""
)


@pytest.mark.parametrize("policy", ["eager", "threads", "fuzz:1"])
def test_a_switch_goes_on_at_the_label_of_its_index(policy: str) -> None:
    lines = output_of(
        BUILT + "for index in (0, 1, 2, 9): print(run(index))", VirtualDeviceConfig(schedule=policy)
    )
    assert lines == ["0.0", "[1.0, 2.0, 0.0]", "[0.0, 2.0, 0.0]", *["[0.0, 0.0, 3.0]"] * 2]


def test_a_built_graph_is_executed_and_waited_for_within_a_limit() -> None:
    lines = output_of(
        BUILT
        + """
choice.fill_(2)
torch.npu.synchronize()
print(acl.aclmdlRIExecute(model, 0), acl.aclmdlRIExecute(model, -1), float(outs[2][0].cpu()))
"""
    )
    assert lines[1:] == [f"{INVALID} 0 3.0"]


def test_building_refuses_what_its_pages_exclude() -> None:
    lines = output_of(
        BUILT
        + """
print(acl.aclmdlRIBindStream(model, first, 0), acl.aclmdlRIBuildEnd(model, None))
other = made("aclmdlRIBuildBegin", 0)
print(acl.aclmdlRIBindStream(other, plain, 0), acl.aclmdlRIBindStream(other, None, 0))
print(acl.aclmdlRIUnbindStream(other, first), acl.aclmdlRIEndTask(other, first))
call("aclmdlRIBindStream", other, first, 0)
print(acl.aclmdlRIBindStream(made("aclmdlRIBuildBegin", 0), first, 0))
print(acl.aclrtSetLabel(c_void_p(labels[0]), first), acl.aclrtSetLabel(c_void_p(labels[0]), plain))
print(acl.aclrtSwitchLabelByIndex(c_void_p(choice.data_ptr()), 2, listed, first),
      acl.aclrtSwitchLabelByIndex(c_void_p(choice.data_ptr()), 3, listed, plain))
print(acl.aclrtCreateLabelList(labels, c_size_t(0), byref(c_void_p())))
call("aclrtDestroyLabelList", listed)
print(acl.aclrtDestroyLabelList(listed), acl.aclrtSetLabel(first, first))
"""
    )
    assert lines[1:] == [
        f"{INVALID} {INVALID}",
        f"{INVALID} {INVALID}",
        f"{INVALID} {INVALID}",
        CAPTURING,
        f"{INVALID} {INVALID}",
        f"{INVALID} {INVALID}",
        INVALID,
        f"{HANDLE} {HANDLE}",
    ]


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
    """Without the wait some of these orders read first."""
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
