"""Ranks that die, disagree, are late or missing are named to the others."""

import pytest

from vllm_davinci_testing.processes.ranks import run_ranks

# Ranks report an error, and wait until all others have reported theirs before they end.
REPORT = """
def report(action):
    begin = time.time()
    try:
        action()
        torch.npu.synchronize()
    except RuntimeError as error:
        print("RAISED", time.time() - begin, str(error), flush=True)
        os._exit(0)
    os._exit(7)
"""


def test_a_killed_rank_is_named_to_the_others_within_a_second() -> None:
    ended = run_ranks(
        REPORT
        + """
x = torch.ones(4 << 20).npu()
dist.all_reduce(x)
torch.npu.synchronize()
dist.barrier()
torch.npu.synchronize()
if rank == 2:
    print("PID", os.getpid(), flush=True)
    os.kill(os.getpid(), 9)
report(lambda: [dist.all_reduce(x) for _ in range(3)])
""",
        3,
    )
    assert [each.status for each in ended] == [0, 0, -9]
    pid = ended[2].output.split("PID ")[1].split()[0]
    for survivor in ended[:2]:
        raised = survivor.output.split("RAISED ")[1]
        assert f"rank 2 (pid {pid}) ended" in raised
        assert "all_reduce" in raised
        # Processes are checked every 50 ms; the rest is for a busy machine.
        assert float(raised.split()[0]) < 1.0


@pytest.mark.parametrize(
    ("action", "messages"),
    [
        (
            "dist.all_reduce(x) if rank == 0 else dist.all_gather_single(y, x)",
            [
                "rank 0 (pid ",
                "runs all_reduce(8 x float32, sum) while rank 1 (pid ",
                "runs all_gather(8 x float32)",
                "same order",
            ],
        ),
        (
            "dist.all_reduce(x[: 4 + rank])",
            ["all_reduce(4 x float32, sum)", "all_reduce(5 x float32, sum)"],
        ),
        ("dist.broadcast(x, rank)", ["root 0", "root 1"]),
        (
            "dist.all_to_all_single(y[: 8 + rank], x, [4, 4 + rank], [4 - rank, 4 + rank])",
            ["sends 12 bytes to rank 0", "which expects 16"],
        ),
        (
            "dist.send(x, 1) if rank == 0 else dist.recv(y, 0)",
            ["sends 8 x float32 to rank 1", "which expects 16 x float32"],
        ),
    ],
    ids=["order", "size", "root", "uneven sizes", "message"],
)
def test_ranks_that_disagree_get_the_difference(action: str, messages: list[str]) -> None:
    ended = run_ranks(
        REPORT
        + f"""
x, y = torch.ones(8).npu(), torch.ones(16).npu()
torch.npu.synchronize()
report(lambda: {action})
""",
        2,
    )
    # A rank that only sends may succeed and end; all other ranks must fail.
    failed = [each for each in ended if each.status == 0]
    assert len(failed) == 2 or ("send" in action and ended[1] in failed), ended
    for each in failed:
        raised = each.output.split("RAISED ")[1]
        for message in messages:
            assert message in raised


def test_a_late_rank_is_named_when_the_time_is_up() -> None:
    ended = run_ranks(
        REPORT
        + """
x = torch.ones(8).npu()
dist.all_reduce(x)
torch.npu.synchronize()
if rank == 1:
    time.sleep(5)
    os._exit(0)
report(lambda: dist.all_reduce(x))
""",
        2,
        HCCL_EXEC_TIMEOUT="2",
    )
    assert [each.status for each in ended] == [0, 0]
    raised = ended[0].output.split("RAISED ")[1]
    assert "waited 2 s in all_reduce #2" in raised
    assert "for rank 1 (pid " in raised
    assert "HCCL_EXEC_TIMEOUT" in raised
    assert "error code is 507048" in raised
    assert "EI0002: " in raised


def test_a_program_that_ends_while_it_waits_for_a_rank_that_has_left_warns_of_a_timeout() -> None:
    ended = run_ranks(
        """
import torch_npu

x = torch.ones(8).npu()
dist.all_reduce(x)
torch.npu.synchronize()
if rank == 1:
    dist.destroy_process_group()
else:
    dist.all_reduce(x)
    print(torch_npu._C._npu_shutdown_synchronize())  # what torch_npu does at a process's end
""",
        2,
        TORCH_NPU_WARNING_DISABLE="0",
    )
    # torch_npu logs no warning for statuses that it raises, such as a lost link (507056).
    assert "error code is 507048" in ended[0].output
    assert "EI0002: rank 1 (pid " in ended[0].output
    assert "has left the group" in ended[0].output
    assert "EI0002" not in ended[1].output


def test_a_rank_that_does_not_join_is_named_when_the_time_is_up() -> None:
    ended = run_ranks(
        REPORT
        + """
if rank == 1:
    time.sleep(5)
    os._exit(0)
report(lambda: dist.all_reduce(torch.ones(8).npu()))
""",
        2,
        HCCL_CONNECT_TIMEOUT="2",
    )
    raised = ended[0].output.split("RAISED ")[1]
    assert "of 2 ranks is incomplete after 2 s: rank 1 did not join" in raised


def test_an_invalid_time_limit_is_an_error() -> None:
    ended = run_ranks(
        REPORT + "report(lambda: dist.all_reduce(torch.ones(8).npu()))", 1, HCCL_EXEC_TIMEOUT="soon"
    )
    assert "HCCL_EXEC_TIMEOUT='soon' is not valid" in ended[0].output
