"""Ranks that fail alike continue, others end; tested with real processes."""

from vllm_davinci_testing.processes.ranks import check_ranks, run_ranks

BEGIN = """
import pytest
from vllm_davinci.core.errors import RankFaultError
from vllm_davinci.core.process import step_guard
from vllm_davinci.core.process.step_guard import StepGuard

hosts = dist.new_group(backend="gloo")
left = []
guard = StepGuard(engine=0, exit=left.append)
launched = []

def step(fails=False, reduces=True):
    if reduces:
        launched.append(dist.all_reduce(torch.ones(4), group=hosts, async_op=True))
    if fails:
        raise ValueError(f"aclnnAdd: npu:{rank} has no memory")
    return rank

def fails_for_good(work):
    with pytest.raises(RankFaultError) as error:
        while True:
            work()
            time.sleep(0.01)
    with pytest.raises(RankFaultError):
        guard.call(step)
    return str(error.value)
"""

ALIKE_THEN_ONE = f"""{BEGIN}
assert guard.call(step) == rank
for _ in range(3):
    with pytest.raises(ValueError, match=f"npu:{{rank}} has"):
        guard.call(step, True)
    assert guard.call(step) == rank

begin = time.monotonic()
told = fails_for_good(lambda: guard.call(step, rank == 1, reduces=False))
assert time.monotonic() - begin < step_guard.SETTLE_S, "a rank that has gone on says so at once"
assert "rank 1 (pid " in told and "in step, call 8 of its worker, at " in told, told
assert "operator aclnnAdd: ValueError: aclnnAdd: npu:1 has no memory" in told, told
dist.barrier(hosts)
guard.close()
"""


def test_ranks_that_fail_at_the_same_point_continue_and_a_single_failure_ends_all():
    check_ranks(ALIKE_THEN_ONE, 3)


SAME_LINE_OTHER_COLLECTIVES = f"""{BEGIN}
told = fails_for_good(lambda: guard.call(step, True, reduces=rank != 1))
assert "npu:0 has no memory" in told or "npu:1 has no memory" in told, told
guard.close()
os._exit(0)  # a reduction of rank 0 has no partner
"""


def test_ranks_that_fail_at_the_same_line_with_other_collectives_behind_them_end():
    check_ranks(SAME_LINE_OTHER_COLLECTIVES, 2)


TOKENS_OF_A_FAILED_STEP = f"""{BEGIN}
from vllm.v1.outputs import AsyncModelRunnerOutput

class Tokens(AsyncModelRunnerOutput):
    def get_output(self):
        return [1, 2, 3]
    def get_kv_connector_output(self):
        return "blocks that have come"

early, late = [guard.output(guard.call(Tokens)) for _ in range(2)]
assert early.get_output() == [1, 2, 3]
assert late.get_kv_connector_output() == "blocks that have come"
dist.barrier(hosts)
if rank == 1:
    fails_for_good(lambda: guard.call(step, True, reduces=False))
else:
    fails_for_good(late.get_output)
dist.barrier(hosts)
guard.close()
"""


def test_no_tokens_are_returned_after_a_rank_has_failed():
    check_ranks(TOKENS_OF_A_FAILED_STEP, 2)


STUCK = f"""{BEGIN}
def reduces():
    dist.all_reduce(torch.ones(4).npu())
    torch.npu.synchronize()

guard.call(reduces)
begin = time.monotonic()
if rank == 1:
    told = fails_for_good(lambda: guard.call(step, True, reduces=False))
else:
    told = fails_for_good(lambda: guard.call(reduces))
assert "rank 1 (pid " in told and "failed in step, call 2" in told, told
assert time.monotonic() - begin < 30
guard.close()
os._exit(0)  # without the communicators that rank 1 has given up
"""


def test_a_rank_that_waits_on_its_device_for_the_one_that_failed_has_the_cause():
    check_ranks(STUCK, 2)


GONE = f"""{BEGIN}
step_guard.LOSS_S, step_guard.SETTLE_S = 0.1, 1.0
assert guard.call(step) == rank
dist.barrier(hosts)
if rank == 1:
    print(f"pid {{os.getpid()}}", flush=True)
    os._exit(3)
guard.call(time.sleep, 3)
"""


def test_ranks_in_a_step_name_a_rank_whose_process_has_ended():
    waiting, gone = run_ranks(GONE, 2)
    assert gone.status == 3
    pid = gone.output.split()[-1]
    assert f"rank 1 (pid {pid} on host " in waiting.output, waiting.output
    assert "has ended" in waiting.output
    assert waiting.status == 1 and "RankFaultError" in waiting.output


MISSED = f"""{BEGIN}
step_guard.LOSS_S = 60.0  # ranks that fail do not wait for it
def reduces():
    dist.all_reduce(torch.ones(4), group=hosts)

others = dist.new_group([0, 2], backend="gloo")
guard.call(reduces)
if rank == 1:
    print(f"pid {{os.getpid()}}", flush=True)
    os._exit(3)
print(fails_for_good(lambda: guard.call(reduces)), flush=True)
dist.barrier(others)
guard.close()
os._exit(0)
"""


def test_ranks_that_fail_because_another_has_ended_name_it():
    first, gone, third = run_ranks(MISSED, 3)
    pid = gone.output.split()[-1]
    for rank in (first, third):
        assert rank.status == 0, rank.output
        assert f"The process of rank 1 (pid {pid} on host " in rank.output, rank.output
