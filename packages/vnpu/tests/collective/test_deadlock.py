"""If ranks' collectives do not match, the race detector reports the line of each."""

import re
from itertools import pairwise

import pytest

from vllm_davinci_testing.processes.forked import Ended
from vllm_davinci_testing.processes.ranks import check_ranks, program_of, run_ranks

# Two groups of the same ranks, both in use, and a way to observe a step's end.
TWO_GROUPS = """
first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
x, y = torch.ones(8).npu(), torch.ones(8).npu()
for group in (first, second):
    dist.all_reduce(x, group=group)
torch.npu.synchronize()


def report(action):
    begin = time.time()
    try:
        action()
        torch.npu.synchronize()
        print("FINISHED", flush=True)
    except RuntimeError as error:
        print("RAISED", time.time() - begin, error, flush=True)
    os._exit(0)  # the groups are of no use any more, not even to end them

"""


def raised_by(ended: list[Ended]) -> list[str]:
    texts = [each.output for each in ended]
    assert all("RAISED" in text for text in texts), texts
    return [text.split("RAISED ")[1] for text in texts]


def lines_of(program: str, *marks: str) -> list[int]:
    """Returns the line numbers that end with these comments."""
    lines = program_of(program).split("\n")
    return [n for mark in marks for n, line in enumerate(lines, 1) if line.endswith(f"# {mark}")]


def assert_in_order(text: str, parts: list[str]) -> None:
    positions = [text.find(part) for part in parts]
    assert -1 not in positions, (parts[positions.index(-1)], text)
    assert all(a < b for a, b in pairwise(positions)), text


CROSSED = {
    "queued behind each other": """
def step():
    if rank == 0:
        dist.all_reduce(x, group=first)  # zero waits
        dist.broadcast(y, 0, group=second)  # zero holds
    else:
        dist.broadcast(y, 0, group=second)  # one waits
        dist.all_reduce(x, group=first)  # one holds

report(step)
""",
    "the host waits in between": """
def step():
    if rank == 0:
        dist.all_reduce(x, group=first)  # zero waits
        x.sum().item()  # zero holds
        dist.broadcast(y, 0, group=second)
    else:
        dist.broadcast(y, 0, group=second)  # one waits
        torch.npu.synchronize()  # one holds
        dist.all_reduce(x, group=first)

report(step)
""",
    "one host waits, the other has queued": """
def step():
    if rank == 0:
        dist.all_reduce(x, group=first)  # zero waits
        x.cpu()  # zero holds
        dist.broadcast(y, 0, group=second)
    else:
        dist.broadcast(y, 0, group=second)  # one waits
        dist.all_reduce(x, group=first)  # one holds

report(step)
""",
}


@pytest.mark.parametrize("schedule", ["eager", "threads"])
@pytest.mark.parametrize("kind", CROSSED)
def test_two_groups_in_crossed_order_are_a_deadlock(kind: str, schedule: str) -> None:
    program = TWO_GROUPS + CROSSED[kind]
    ended = run_ranks(program, 2, VNPU_RACES="report", VNPU_SCHEDULE=schedule)
    zero = lines_of(program, "zero waits", "zero holds")
    one = lines_of(program, "one waits", "one holds")
    assert all(float(text.split()[0]) < 10.0 for text in raised_by(ended))
    # At least one rank finds the deadlock, and prints it.
    reports = "".join(each.output for each in ended).split("vnpu: deadlock of two groups")[1:]
    assert reports
    for report in reports:
        assert "same order" in report
        named = [int(n) for n in re.findall(r"<program>:(\d+) in step", report)]
        assert named[:4] in (zero + one, one + zero)


def test_ranks_that_disagree_get_the_lines_of_both() -> None:
    program = (
        TWO_GROUPS
        + """
def step():
    if rank == 0:
        dist.all_reduce(x)  # zero
    else:
        dist.broadcast(x, 0)  # one

report(step)
"""
    )
    [zero, one] = lines_of(program, "zero", "one")
    for text in raised_by(run_ranks(program, 2, VNPU_RACES="report")):
        assert_in_order(
            text,
            [
                "runs all_reduce(8 x float32, sum), launched at\n",
                f"<program>:{zero} in step",
                "while rank 1 (pid ",
                "runs broadcast(8 x float32, root 0), launched at\n",
                f"<program>:{one} in step",
                "Every rank must call",
            ],
        )


def test_a_message_that_is_not_expected_names_the_lines_of_both() -> None:
    program = (
        TWO_GROUPS
        + """
def step():
    if rank == 0:
        dist.send(x, 1)  # zero
    else:
        dist.recv(torch.ones(16).npu(), 0)  # one

report(step)
"""
    )
    [zero, one] = lines_of(program, "zero", "one")
    ended = run_ranks(program, 2, VNPU_RACES="report")
    [text] = raised_by(ended[1:])
    assert_in_order(
        text,
        ["sends 8 x float32 to rank 1", "sent at", f":{zero} in step", "expected at", f":{one} in"],
    )


def test_a_late_rank_s_newest_launch_is_named_when_the_time_is_up() -> None:
    program = (
        TWO_GROUPS
        + """
def step():
    dist.all_reduce(x, group=first)  # both
    torch.npu.synchronize()
    if rank == 1:
        time.sleep(5)
        os._exit(0)
    dist.all_reduce(x, group=first)  # zero

report(step)
"""
    )
    [both, zero] = lines_of(program, "both", "zero")
    ended = run_ranks(program, 2, VNPU_RACES="report", HCCL_EXEC_TIMEOUT="2")
    [text] = raised_by(ended[:1])
    assert_in_order(
        text,
        [
            "waited 2 s in all_reduce #3",
            "all_reduce #3 was launched at",
            f"<program>:{zero} in step",
            ") launched its #2 at",
            f"<program>:{both} in step",
        ],
    )


CORRECT = {
    "crossed, but on streams of their own": """
mine, other = (first, second) if rank == 0 else (second, first)
one = dist.all_reduce(x if rank == 0 else y, group=mine, async_op=True)
time.sleep(2.0 + rank)
two = dist.all_reduce(y if rank == 0 else x, group=other, async_op=True)
one.wait()
two.wait()
torch.npu.synchronize()
""",
    "a rank that comes late": """
if rank == 1:
    time.sleep(2.5)
for group in (first, second, first):
    dist.all_reduce(x, group=group)
    x.sum().item()
""",
}


@pytest.mark.parametrize("kind", CORRECT)
def test_ranks_that_only_wait_are_no_deadlock(kind: str) -> None:
    for text in check_ranks(TWO_GROUPS + CORRECT[kind], 2, VNPU_RACES="raise"):
        assert "vnpu:" not in text
