"""The race detector finds every kind of planted race, and none in correct programs."""

import re

import pytest

from vllm_davinci_testing.processes.forked import Ended, output_of, run_alone, run_to_exit
from vllm_davinci_testing.processes.racing_programs import (
    CORRECT,
    FINISH,
    PLANTED,
    PLANTED_ON_HOST,
    SETUP,
)
from vllm_davinci_testing.processes.ranks import check_ranks, program_of


def marked_lines(program: str) -> list[int]:
    return [n for n, line in enumerate(program.split("\n"), 1) if line.endswith("# <-")]


def reported_lines(text: str) -> list[list[int]]:
    """Returns the lines of <program> that each report names."""
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


# A collective that the program has not waited for.
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
def test_buffers_of_a_collective_without_a_wait_race(kind: str) -> None:
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


def test_a_change_without_a_wait_is_found_at_the_exit() -> None:
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


@pytest.mark.parametrize("kind", CORRECT)
def test_a_correct_program_gives_no_report(kind: str) -> None:
    text = run_detected(SETUP + CORRECT[kind] + FINISH).output
    assert "vnpu:" not in text
    assert "races: 0" in text


def test_the_number_of_races_is_reported_at_the_end() -> None:
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
def test_found_races_do_not_depend_on_the_schedule(schedule: str) -> None:
    program = SETUP + PLANTED["read after write, no wait"] + "torch.npu.synchronize()\n"
    done = run_to_exit(program, VNPU_RACES="report", VNPU_SCHEDULE=schedule)
    assert "vnpu: 1 race found." in done.stderr
