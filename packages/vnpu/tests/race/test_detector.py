"""The race detector: it finds every kind of planted race, and is silent on correct programs."""

import re

import pytest

from vllm_davinci_testing.processes.forked import Ended, output_of, run_alone, run_to_exit
from vllm_davinci_testing.processes.ranks import check_ranks, program_of

SETUP = """
import torch
main = torch.npu.current_stream()
side, third = torch.npu.Stream(), torch.npu.Stream()
x = torch.ones(256, 16, device="npu")
y = torch.zeros(256, 16, device="npu")
out = torch.zeros(256, 16, device="npu")
pinned = torch.zeros(256, 16).pin_memory()
event = torch.npu.Event()
torch.npu.synchronize()
"""

# What each program does wrong -> its source, after SETUP. The two launches that race are marked, in
# the order of their launch.
PLANTED = {
    "read after write, no wait": """
y.add_(1.0)  # <-
with torch.npu.stream(side):
    out.copy_(y)  # <-
""",
    "write after read, no wait": """
torch.add(x, 1.0, out=out)  # <-
with torch.npu.stream(side):
    x.zero_()  # <-
""",
    "write after write, no wait": """
out.zero_()  # <-
with torch.npu.stream(side):
    out.fill_(3.0)  # <-
""",
    "the wait comes after the use": """
y.add_(1.0)  # <-
with torch.npu.stream(side):
    out.copy_(y)  # <-
    side.wait_stream(main)
""",
    "the event was recorded before the write": """
event.record(main)
y.add_(1.0)  # <-
with torch.npu.stream(side):
    side.wait_event(event)
    out.copy_(y)  # <-
""",
    "the wrong stream waits": """
y.add_(1.0)  # <-
event.record(main)
third.wait_event(event)
with torch.npu.stream(side):
    out.copy_(y)  # <-
""",
    # torch_npu makes an event at its first record and leaves a wait before that out, so this one
    # goes to the runtime directly.
    "the event is never recorded": """
import ctypes
acl, handle = ctypes.CDLL("libascendcl.so"), ctypes.c_void_p()
acl.aclrtCreateEventExWithFlag(ctypes.byref(handle), 0)
y.add_(1.0)  # <-
acl.aclrtStreamWaitEvent(ctypes.c_void_p(side.npu_stream), handle)
with torch.npu.stream(side):
    out.copy_(y)  # <-
""",
    "the join is missing": """
side.wait_stream(main)
with torch.npu.stream(side):
    y.add_(1.0)  # <-
torch.add(y, 1.0, out=out)  # <-
""",
    "memory is reused while a side stream reads it": """
z = x + 1.0
side.wait_stream(main)
with torch.npu.stream(side):
    out.copy_(z)  # <-
del z
w = x + 2.0  # <-
""",
    "a matrix product beside the write of its operand": """
w = torch.ones(16, 16, device="npu")
torch.npu.synchronize()
with torch.npu.stream(side):
    w.fill_(2.0)  # <-
torch.mm(x, w)  # <-
""",
    "overlapping rows of one tensor": """
x[:130].fill_(1.0)  # <-
with torch.npu.stream(side):
    x[129:].fill_(2.0)  # <-
""",
    "elements between those of a newer use with the same ends": """
nine = y.view(-1)[:9]
nine[::2].fill_(1.0)  # <-
nine[::4].fill_(2.0)
with torch.npu.stream(side):
    nine[2:3].fill_(3.0)  # <-
""",
    "a copy to the host that does not wait for the product": """
y.add_(1.0)  # <-
with torch.npu.stream(side):
    pinned.copy_(y, non_blocking=True)  # <-
""",
    "two copies into one host buffer": """
pinned.copy_(x, non_blocking=True)  # <-
with torch.npu.stream(side):
    pinned.copy_(y, non_blocking=True)  # <-
""",
    "a graph replay beside a write of its input": """
graph = torch.npu.NPUGraph()
with torch.npu.graph(graph):
    g = x + y
torch.npu.synchronize()
graph.replay()  # <-
with torch.npu.stream(side):
    x.fill_(5.0)  # <-
""",
    "two branches of a captured graph": """
graph = torch.npu.NPUGraph()
with torch.npu.graph(graph):
    capture = torch.npu.current_stream()
    side.wait_stream(capture)
    y.add_(1.0)  # <-
    with torch.npu.stream(side):
        y.mul_(2.0)  # <-
    capture.wait_stream(side)
""",
}

# The host changes pinned memory that a copy may still read. Marked: the copy, and where it shows.
PLANTED_ON_HOST = {
    "written while the copy may not have run": """
x.copy_(pinned, non_blocking=True)  # <-
pinned.fill_(2.0)
torch.npu.synchronize()  # <-
""",
    "written after a wait for an event from before the copy": """
event.record(main)
x.copy_(pinned, non_blocking=True)  # <-
event.synchronize()
pinned[3, 5] = 1.0
main.synchronize()  # <-
""",
    "written after a wait for another stream": """
with torch.npu.stream(side):
    x.copy_(pinned, non_blocking=True)  # <-
main.synchronize()
pinned.fill_(2.0)
side.synchronize()  # <-
""",
    "written between two copies of it": """
x.copy_(pinned, non_blocking=True)  # <-
pinned.fill_(2.0)
y.copy_(pinned, non_blocking=True)  # <-
""",
    "written while a replayed graph may copy it": """
graph = torch.npu.NPUGraph()
with torch.npu.graph(graph):
    x.copy_(pinned, non_blocking=True)
torch.npu.synchronize()
graph.replay()  # <-
pinned.fill_(2.0)
main.synchronize()  # <-
""",
    "freed while the copy may not have run": """
import ctypes
acl, buffer = ctypes.CDLL("libascendcl.so"), ctypes.c_void_p()
acl.aclrtMallocHost(ctypes.byref(buffer), 64)
target, stream = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(main.npu_stream)
acl.aclrtMemcpyAsync(target, 64, buffer, 64, 1, stream)  # <-
acl.aclrtFreeHost(buffer)  # <-
""",
}

CORRECT = {
    "wait_stream both ways": """
y.add_(1.0)
side.wait_stream(main)
with torch.npu.stream(side):
    out.copy_(y)
main.wait_stream(side)
out.add_(1.0)
""",
    "a chain through a third stream": """
y.add_(1.0)
event.record(main)
third.wait_event(event)
side.wait_stream(third)
with torch.npu.stream(side):
    out.copy_(y)
""",
    "the host waits": """
y.add_(1.0)
torch.npu.synchronize()
with torch.npu.stream(side):
    out.copy_(y)
""",
    "the host waits for an event": """
y.add_(1.0)
event.record(main)
event.synchronize()
with torch.npu.stream(side):
    out.copy_(y)
""",
    "both only read": """
torch.add(x, 1.0, out=out)
with torch.npu.stream(side):
    torch.add(x, 2.0, out=y)
""",
    "disjoint rows": """
x[:128].fill_(1.0)
with torch.npu.stream(side):
    x[128:].fill_(2.0)
""",
    "columns that interleave in memory": """
x[:, :8].fill_(1.0)
with torch.npu.stream(side):
    x[:, 8:].fill_(2.0)
""",
    "elements that two uses with the same ends leave out": """
nine = y.view(-1)[:9]
nine[::2].fill_(1.0)
nine[::4].fill_(2.0)
with torch.npu.stream(side):
    nine[1::2].fill_(3.0)
""",
    "record_stream keeps reused memory apart": """
z = x + 1.0
side.wait_stream(main)
with torch.npu.stream(side):
    out.copy_(z)
z.record_stream(side)
del z
w = x + 2.0
""",
    "an event used again": """
for step in range(5):
    y.add_(1.0)
    event.record(main)
    side.wait_event(event)
    with torch.npu.stream(side):
        out.copy_(y)
    main.wait_stream(side)
""",
    "the host waits for each copy before it writes again": """
for step in range(3):
    pinned.fill_(step)
    x.copy_(pinned, non_blocking=True)
    event.record(main)
    event.synchronize()
""",
    "the host asks until the copy is complete": """
x.copy_(pinned, non_blocking=True)
event.record(main)
while not event.query():
    pass
pinned.fill_(2.0)
""",
    "pinned memory that torch uses again": """
for step in range(20):
    x.copy_(torch.full((256, 16), float(step)).pin_memory(), non_blocking=True)
""",
    "a copy to the host and back": """
for step in range(3):
    pinned.copy_(x, non_blocking=True)
    y.copy_(pinned, non_blocking=True)
    x.add_(y)
""",
    "two buffers in turn": """
buffers = [torch.zeros(256, 16).pin_memory() for _ in range(2)]
events = [torch.npu.Event() for _ in buffers]
for step in range(6):
    events[step % 2].synchronize()
    buffers[step % 2].fill_(step)
    x.copy_(buffers[step % 2], non_blocking=True)
    events[step % 2].record(main)
""",
    "a captured fork and join": """
graph = torch.npu.NPUGraph()
with torch.npu.graph(graph):
    capture = torch.npu.current_stream()
    y.add_(1.0)
    side.wait_stream(capture)
    with torch.npu.stream(side):
        out.copy_(y)
    capture.wait_stream(side)
    out.add_(1.0)
torch.npu.synchronize()
graph.replay()
graph.replay()
""",
}


FINISH = """
torch.npu.synchronize()
from vllm_davinci.vnpu import _C
print("races:", _C.races_found())
"""


def marked_lines(program: str) -> list[int]:
    return [n for n, line in enumerate(program.split("\n"), 1) if line.endswith("# <-")]


def reported_lines(text: str) -> list[list[int]]:
    """The lines of <program> that each report names."""
    reports = re.split(r"^vnpu: ", text, flags=re.MULTILINE)[1:]
    return [[int(n) for n in re.findall(r"<program>:(\d+)", report)] for report in reports]


def run_detected(program: str, **variables: str) -> Ended:
    ended = run_alone(program, **{"VNPU_RACES": "report", **variables})
    assert ended.status == 0, ended.output[-3000:]
    return ended


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_race_is_found_and_both_lines_are_named(kind: str) -> None:
    program = SETUP + PLANTED[kind] + FINISH
    text = run_detected(program).output
    [race] = [part for part in text.split("\nvnpu: ") if "race on" in part]
    assert "Nothing orders the two" in race
    assert reported_lines(text)[-1] == marked_lines(program)
    unrecorded = kind == "the event is never recorded"
    assert ("never recorded" in text) == unrecorded
    assert f"races: {2 if unrecorded else 1}" in text


# The same for a collective that has been started and that nobody has waited for.
PLANTED_BEHIND_COLLECTIVES = {
    "its result is used": """
work = dist.all_reduce(x, async_op=True)  # <-
out = x + 1.0  # <-
work.wait()
""",
    "its input is changed": """
work = dist.all_gather_single(y, x, async_op=True)  # <-
x.fill_(2.0)  # <-
work.wait()
""",
    "its result is used after the watchdog has seen the end": """
work = dist.all_reduce(x, async_op=True)  # <-
time.sleep(2.0)
out = x + 1.0  # <-
work.wait()
""",
    "another group works on the same buffer": """
work = dist.all_reduce(x, async_op=True)  # <-
other = dist.broadcast(x, 0, group=second, async_op=True)  # <-
work.wait()
other.wait()
""",
}
OF_RANKS = """
second = dist.new_group([0, 1])
x, y = torch.ones(8).npu(), torch.ones(16).npu()
for group in (None, second):
    dist.all_reduce(y, group=group)
torch.npu.synchronize()
"""


@pytest.mark.parametrize("kind", PLANTED_BEHIND_COLLECTIVES)
def test_buffers_of_a_collective_that_nobody_waited_for_race(kind: str) -> None:
    program = OF_RANKS + PLANTED_BEHIND_COLLECTIVES[kind] + FINISH
    for text in check_ranks(program, 2, VNPU_RACES="report"):
        assert "Nothing orders the two" in text
        assert reported_lines(text) == [marked_lines(program_of(program))]
        assert "races: 1" in text


def test_buffers_of_a_collective_are_free_after_the_wait_for_it() -> None:
    program = """
for step in range(3):
    x.fill_(step)
    work = dist.all_gather_single(y, x, async_op=True)
    out = x + 1.0
    work.wait()
    x.copy_(y[:8])
"""
    for text in check_ranks(OF_RANKS + program + FINISH, 2, VNPU_RACES="report"):
        assert "races: 0" in text


@pytest.mark.parametrize("kind", PLANTED_ON_HOST)
def test_a_change_of_memory_that_a_copy_may_read_is_found(kind: str) -> None:
    program = SETUP + PLANTED_ON_HOST[kind] + FINISH
    text = run_detected(program).output
    assert "bytes of pinned host memory" in text
    assert reported_lines(text) == [marked_lines(program)]
    assert "races: 1" in text


def test_a_change_for_which_nobody_waits_is_found_at_the_exit() -> None:
    done = run_to_exit(
        """
        import ctypes
        from vllm_davinci import vnpu
        acl = ctypes.CDLL("libascendcl.so")
        buffer, device, stream = (ctypes.c_void_p() for _ in range(3))
        acl.aclrtSetDevice(0)
        acl.aclrtMallocHost(ctypes.byref(buffer), 64)
        acl.aclrtMalloc(ctypes.byref(device), 64, 0)
        acl.aclrtCreateStream(ctypes.byref(stream))
        acl.aclrtMemcpyAsync(device, 64, buffer, 64, 1, stream)
        ctypes.memset(buffer, 7, 64)
        """,
        VNPU_RACES="report",
    )
    assert "changed by the host, as seen at\n      the exit" in done.stderr
    assert "<program>:10 in <module>" in done.stderr
    assert "vnpu: 1 race found." in done.stderr


# A launch uses two pieces of device memory, one of which is freed behind a wait, or behind none.
FREES = """
import ctypes
from ctypes import byref, c_size_t
acl = ctypes.CDLL("libascendcl.so")
device, other, third, stream, idle, event = (ctypes.c_void_p() for _ in range(6))
acl.aclrtSetDevice(0)
for memory in (device, other, third):
    acl.aclrtMalloc(byref(memory), c_size_t(512), 0)
acl.aclrtCreateStream(byref(stream))
acl.aclrtCreateStream(byref(idle))
acl.aclrtCreateEvent(byref(event))
acl.aclrtMemsetAsync(third, c_size_t(512), 0, c_size_t(512), idle)
acl.aclrtMemcpyAsync(device, c_size_t(64), other, c_size_t(64), 3, stream)
acl.aclrtRecordEvent(event, stream)
{wait}
print("status", acl.aclrtFree({freed}))
"""
ENOUGH = {
    "its stream": "acl.aclrtSynchronizeStream(stream)",
    "an event behind it": "acl.aclrtSynchronizeEvent(event)",
    "the device": "acl.aclrtSynchronizeDevice()",
}


@pytest.mark.parametrize("wait", ["", "acl.aclrtSynchronizeStream(idle)"], ids=["none", "another"])
@pytest.mark.parametrize(("freed", "use"), [("device", "write"), ("other", "read")])
def test_memory_that_is_freed_while_a_launch_may_use_it_is_found(
    wait: str, freed: str, use: str
) -> None:
    source = FREES.format(wait=wait, freed=freed)
    done = run_to_exit(source, VNPU_RACES="report")
    line = source[: source.index("print")].count("\n") + 1
    assert "status 0" in done.stdout, done.stderr
    assert f"{use} by memory copy on stream" in done.stderr
    assert f"freed by the host at\n      <program>:{line} in <module>" in done.stderr
    assert "vnpu: 1 race found." in done.stderr
    assert "aclrtFree waits for nobody" in done.stderr


@pytest.mark.parametrize("wait", ENOUGH)
def test_memory_that_is_freed_behind_a_wait_for_its_launches_is_no_race(wait: str) -> None:
    source = FREES.format(wait=ENOUGH[wait], freed="device")
    done = run_to_exit(source, VNPU_RACES="report")
    assert "status 0" in done.stdout
    assert "vnpu: 0 races found." in done.stderr


def test_raise_keeps_memory_that_a_launch_may_use() -> None:
    done = run_to_exit(FREES.format(wait="", freed="device"), VNPU_RACES="raise")
    assert "status 0" not in done.stdout
    assert "status" in done.stdout


@pytest.mark.parametrize("queue", ["0", "1"])
def test_torch_npu_waits_before_it_frees(queue: str) -> None:
    """Segments that its allocator gives back, and a workspace that grows."""
    done = run_to_exit(
        """
        import torch
        for size in (1, 8, 16):
            x = torch.ones(size << 20, device="npu")
            y = (x * 2.0).sort().values
            del x, y
            torch.npu.empty_cache()
        """,
        VNPU_RACES="report",
        VNPU_SOC="Ascend910B3",
        TASK_QUEUE_ENABLE=queue,
    )
    assert done.status == 0, done.stderr
    assert "vnpu: 0 races found." in done.stderr


@pytest.mark.parametrize("kind", CORRECT)
def test_a_correct_program_gives_no_report(kind: str) -> None:
    text = run_detected(SETUP + CORRECT[kind] + FINISH).output
    assert "vnpu:" not in text
    assert "races: 0" in text


def test_the_number_of_races_is_told_at_the_end() -> None:
    done = run_to_exit(SETUP + CORRECT["both only read"], VNPU_RACES="report")
    assert "vnpu: 0 races found." in done.stderr
    assert done.status == 0, done.stderr


def test_raise_stops_the_program_at_the_second_launch() -> None:
    lines = output_of(
        SETUP
        + """
y.add_(1.0)
try:
    with torch.npu.stream(side):
        out.copy_(y)
except RuntimeError as error:
    print("race on" in str(error))
""",
        VNPU_RACES="raise",
    )
    assert lines == ["True"]


@pytest.mark.parametrize("schedule", ["threads", "fuzz:1", "fuzz:2"])
def test_what_is_found_does_not_depend_on_the_schedule(schedule: str) -> None:
    program = SETUP + PLANTED["read after write, no wait"] + "torch.npu.synchronize()\n"
    done = run_to_exit(program, VNPU_RACES="report", VNPU_SCHEDULE=schedule)
    assert "vnpu: 1 race found." in done.stderr
