"""Injects a fault at every point where a program can fail.

Each time the program gives the same answer, bit for bit, or ends with a nonzero status and an error
that names the cause. No process is left 30 s after the start-up time. A point that no run reaches
is an error of the test.
"""

import struct
import time
from pathlib import Path

import pytest

from vllm_davinci_testing.processes.forked import Ended, run_alone
from vllm_davinci_testing.processes.ranks import run_ranks

LIMIT_S = 30.0  # from the fault to the end of all processes
# Limit of a program's start on a busy machine.
START_S = 60.0

ALONE = """
import torch
x = torch.arange(64.0 * 64).reshape(64, 64).npu() / 4096
side, event = torch.npu.Stream(), torch.npu.Event()
for _ in range(3):
    x = x @ x * 0.01
    event.record()
    side.wait_event(event)
    with torch.npu.stream(side):
        y = x + 1
    torch.npu.current_stream().wait_stream(side)
pinned = torch.empty(64, 64, pin_memory=True)
pinned.copy_(y, non_blocking=True)
torch.npu.synchronize()
print("answer", float(pinned.double().sum()), flush=True)
"""
POINTS_ALONE = 72
# The second of three passes fails, and the program catches the error.
CAUGHT = """
import gc, os, torch

def work():
    x = torch.arange(64.0 * 64).reshape(64, 64).npu() / 4096
    side, event = torch.npu.Stream(), torch.npu.Event()
    event.record()
    side.wait_event(event)
    with torch.npu.stream(side):
        y = x @ x + 1
    torch.npu.current_stream().wait_stream(side)
    big = torch.zeros(1 << 22, dtype=torch.float32, device="npu") + y[0, 0]
    pinned = torch.empty(64, 64, pin_memory=True)
    pinned.copy_(y, non_blocking=True)
    torch.npu.synchronize()
    return float(pinned.double().sum()), float(big[7])

def held():
    gc.collect()
    torch.npu.synchronize()
    torch.npu.empty_cache()
    with open("/proc/self/maps") as maps:
        shared = sum("/dev/shm" in line or "memfd" in line for line in maps)
    return torch.npu.mem_get_info()[0], len(os.listdir("/proc/self/fd")), shared

work()
work()  # torch_npu has its workspaces and streams by now
before = held()
print("pass", flush=True)
try:
    work()
except (RuntimeError, MemoryError) as error:
    print("caught", str(error).splitlines()[0])
print("held", before, held(), flush=True)
print("answer", work(), flush=True)
"""
POINTS_CAUGHT = 150
TOGETHER = """
x = torch.full((1000,), float(rank + 1)).npu()
for _ in range(3):
    dist.all_reduce(x)
    x = x * 0.5
out = torch.empty(2000).npu()
dist.all_gather_single(out, x)
other = torch.empty(1000).npu()
if rank == 0:
    dist.send(x, 1)
else:
    dist.recv(other, 0)
print("answer", float(out.double().sum().cpu()), flush=True)
"""
POINTS_TOGETHER = 120


def points_in(directory: Path) -> dict[int, int]:
    """Returns the number of fault points reached by each rank."""
    heads = [struct.unpack_from("=qQ", f.read_bytes()) for f in directory.glob("*.points")]
    return {int(rank): int(points) for rank, points in heads}


def answers(ended: list[Ended]) -> set[str]:
    """Returns all answers that processes printed, whether or not they succeeded."""
    return {
        line for each in ended for line in each.stdout.splitlines() if line.startswith("answer")
    }


def check_outcome(ended: list[Ended], expected: set[str], plan: str) -> None:
    """Asserts that no answer is wrong after a fault, and that there is an answer or an error."""
    outputs = "\n".join(each.output[-3000:] for each in ended)
    assert answers(ended) <= expected, f"{plan}: a wrong answer\n{outputs}"
    if all(each.status == 0 for each in ended):
        assert answers(ended) == expected, f"{plan}: no answer and no error\n{outputs}"
        return
    failed = [each for each in ended if each.status != 0]
    # Before the group is complete, torch names the missing rank.
    named = ("VNPU_FAULTS", "rank 0", "rank 1")
    assert all(any(name in each.output for name in named) for each in failed), outputs


def counted(program: str, directory: Path) -> tuple[set[str], int]:
    """Runs a one-process program; returns its answer and its number of fault points."""
    ended = run_alone(program, VNPU_FAULTS=f"count:{directory}")
    assert ended.status == 0, ended.output
    return answers([ended]), points_in(directory)[0]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], int]:
    return counted(ALONE, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], dict[int, int]]:
    """Runs the two-rank program; returns its answer and each rank's number of fault points."""
    directory = tmp_path_factory.mktemp("together")
    ended = run_ranks(TOGETHER, 2, VNPU_FAULTS=f"count:{directory}")
    assert [each.status for each in ended] == [0, 0], ended
    return answers(ended), points_in(directory)


def test_the_points_of_both_programs_are_in_the_grids(alone, together):
    assert POINTS_ALONE / 2 < alone[1] <= POINTS_ALONE
    assert all(POINTS_TOGETHER / 2 < points <= POINTS_TOGETHER for points in together[1].values())


@pytest.mark.thorough
@pytest.mark.parametrize("action", ["oom", "throw"])
@pytest.mark.parametrize("point", range(1, POINTS_ALONE + 1))
def test_a_program_answers_correctly_or_names_the_failure(point, action, alone):
    expected, points = alone
    if point > points:
        return  # the grid has more points than the program
    plan = f"point@{point}={action}"
    begin = time.monotonic()
    ended = run_alone(ALONE, VNPU_FAULTS=plan, VNPU_WAIT_LIMIT="10")
    assert time.monotonic() - begin < START_S + LIMIT_S
    assert plan in ended.output
    check_outcome([ended], expected, plan)


@pytest.mark.thorough
@pytest.mark.parametrize("action", ["throw", "die"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("point", range(1, POINTS_TOGETHER + 1))
def test_ranks_answer_correctly_or_name_the_failure(point, rank, action, together):
    expected, points = together
    if point > points[rank]:
        return
    plan = f"rank={rank};point@{point}={action}"
    begin = time.monotonic()
    ended = run_ranks(
        TOGETHER, 2, VNPU_FAULTS=plan, VNPU_WAIT_LIMIT="12", HCCL_EXEC_TIMEOUT="10",
        HCCL_CONNECT_TIMEOUT="8",
    )  # fmt: skip
    assert time.monotonic() - begin < START_S + LIMIT_S
    assert any(f"point@{point}={action}" in each.output for each in ended)
    check_outcome(ended, expected, plan)


@pytest.fixture(scope="module")
def caught(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], int]:
    return counted(CAUGHT, tmp_path_factory.mktemp("caught"))


@pytest.mark.thorough
@pytest.mark.parametrize("action", ["oom", "throw"])
@pytest.mark.parametrize("point", range(1, POINTS_CAUGHT // 2))
def test_a_failure_that_is_caught_leaves_memory_and_descriptors_as_they_were(point, action, caught):
    expected, points = caught
    assert points <= POINTS_CAUGHT
    plan = f"point@{points // 2 + point}={action}"  # a point in the later passes
    ended = run_alone(CAUGHT, VNPU_FAULTS=plan, VNPU_WAIT_LIMIT="10")
    check_outcome([ended], expected, plan)
    if "caught" in ended.stdout and ended.status == 0:
        [line] = [each for each in ended.stdout.splitlines() if each.startswith("held")]
        before, after = line.removeprefix("held ").split(") (")
        assert before.strip("()") == after.strip("()"), f"{plan}: {line}"
