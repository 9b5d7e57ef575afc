"""Planned faults occur where the plan says, and nowhere else."""

import struct
from pathlib import Path

import pytest

from vllm_davinci.vnpu import _C, VirtualDeviceConfig
from vllm_davinci_testing.processes.forked import output_of, run_alone
from vllm_davinci_testing.processes.ranks import run_ranks

PRODUCTS = """
import torch
x = torch.ones(64, 64, device="npu")
for _ in range(3):
    x = x @ x * 0.01
print(float(x.sum().cpu()))
"""
ANSWER = "180.14378356933594"
RUNTIME = """
import ctypes
import torch
torch.npu.set_device(0)
acl = ctypes.CDLL("libascendcl.so")
acl.aclGetRecentErrMsg.restype = ctypes.c_char_p
address, stream, event = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()

def allocate():
    return acl.aclrtMalloc(ctypes.byref(address), ctypes.c_size_t(4096), 0)
"""


def test_an_operator_fails_at_its_launch_with_the_code_that_the_plan_names() -> None:
    ended = run_alone(PRODUCTS, VNPU_FAULTS="launch:aclnnMatmul@2=507034")
    assert ended.status != 0
    assert "507034" in ended.output
    assert "VNPU_FAULTS: launch:aclnnMatmul@2=507034 at launch:aclnnMatmul" in ended.output


def test_a_launch_that_fails_on_the_device_is_found_by_the_next_wait() -> None:
    lines = output_of(
        RUNTIME
        + """
assert allocate() == 0
size = ctypes.c_size_t(4096)
assert acl.aclrtMemsetAsync(address, size, 1, size, None) == 0
print(acl.aclrtMemsetAsync(address, size, 2, size, None))
print(acl.aclrtSynchronizeDevice(), acl.aclGetRecentErrMsg().decode())
print(acl.aclrtMemsetAsync(address, size, 3, size, None), acl.aclrtSynchronizeDevice())
""",
        VNPU_FAULTS="launch:memory fill@2=async:507035",
    )
    assert lines[0] == "0"
    assert lines[1].startswith("507035 vnpu: VNPU_FAULTS: launch:memory fill@2=async:507035")
    assert lines[2] == "0 0"


def test_a_rule_holds_once_and_with_a_plus_from_there_on() -> None:
    program = RUNTIME + "print([allocate() for _ in range(5)])"
    assert output_of(program, VNPU_FAULTS="alloc@2=oom") == ["[0, 207001, 0, 0, 0]"]
    assert output_of(program, VNPU_FAULTS="alloc@3+=oom") == ["[0, 0, 207001, 207001, 207001]"]
    plan = "rank=1; alloc@1+=oom\nrank=0\n# of this rank\nalloc@4=207001\n"
    assert output_of(program, VNPU_FAULTS=plan) == ["[0, 0, 0, 207001, 0]"]


def test_streams_events_pinned_memory_and_waits_fail_with_cann_s_codes() -> None:
    lines = output_of(
        RUNTIME
        + """
print(acl.aclrtCreateStream(ctypes.byref(stream)), acl.aclrtCreateStream(ctypes.byref(stream)))
print(acl.aclrtCreateEvent(ctypes.byref(event)), acl.aclrtCreateEvent(ctypes.byref(event)))
size = ctypes.c_size_t(4096)
print(acl.aclrtMallocHost(ctypes.byref(address), size))
print(acl.aclrtSynchronizeStream(stream), acl.aclrtSynchronizeStream(stream))
print(acl.aclrtRecordEvent(event, stream))
""",
        VNPU_FAULTS="stream@1=207005;event:create@1=207007;pinned@1=oom;synchronize:stream@1=507046;"
        "event:record@1=507899",
    )
    assert lines == ["207005 0", "207007 0", "207001", "507046 0", "507899"]


def test_a_hanging_task_is_named_by_the_wait_for_it() -> None:
    [line] = output_of(
        RUNTIME
        + """
assert allocate() == 0
size = ctypes.c_size_t(4096)
assert acl.aclrtMemsetAsync(address, size, 1, size, None) == 0
print(acl.aclrtSynchronizeDevice(), acl.aclGetRecentErrMsg().decode())
""",
        VNPU_FAULTS="launch@1=async:hang",
        VNPU_WAIT_LIMIT="1",
    )
    assert line.startswith("507046 vnpu: waited 1000 ms for a device")
    assert "(memory fill) waits for vnpu: VNPU_FAULTS: launch@1=async:hang" in line


def test_a_delay_changes_no_result() -> None:
    plan = "launch@2=async:delay:50ms;launch@3=delay:20ms"
    ended = run_alone(PRODUCTS, VNPU_FAULTS=plan)
    assert ended.status == 0, ended.output
    assert ended.stdout.split()[-1] == ANSWER
    assert ended.stderr.count("VNPU_FAULTS:") == 2


def test_points_are_counted_by_process_and_kind(tmp_path: Path) -> None:
    config = VirtualDeviceConfig(faults=f"count:{tmp_path}")
    output_of(PRODUCTS, config)
    [file] = tmp_path.glob("*.points")
    rank, points = struct.unpack_from("=qQ", file.read_bytes())
    assert rank == 0
    assert 10 < points < 100


@pytest.mark.parametrize(
    ("plan", "where", "what"),
    [
        ("aloc@1=oom", "1:1", "Did you mean 'alloc'?"),
        ("alloc@1=oom;launch@0=throw", "1:20", "the number of a point, 1 to"),
        ("alloc@1=oom\n  launch:aclnnMatmul=throw", "2:21", "expected @"),
        ("launch@2=thow", "1:10", "Did you mean 'throw'?"),
        ("launch@2=12", "1:10", "a status of CANN, 100000 to 999999"),
        ("collective:all_reduce@2.putt=die", "1:25", "Did you mean 'put'?"),
        ("alloc@2.put=die", "1:9", "only a collective has phases"),
        ("alloc@2=async:oom", "1:9", "only a launch fails asynchronously"),
        ("launch@2=delay:5", "1:17", "expected ms or s"),
        ("launch@2=hang", "1:10", "async:hang"),
        ("rank=x", "1:6", "a rank, 0 to"),
        ("segment:opn@1=throw", "1:15", "Did you mean 'open'?"),
        ("segment:open@1=truncated", "1:16", "truncated is for segment:map"),
        ("count:", "1:7", "needs a directory"),
        ("alloc@1=oom die", "1:9", "is nothing that can happen"),
    ],
)
def test_a_plan_that_is_wrong_is_refused_with_line_and_column(plan, where, what):
    with pytest.raises(RuntimeError) as raised:
        _C.check_fault_plan(plan)
    assert f"VNPU_FAULTS:{where}: " in str(raised.value), raised.value
    assert what in str(raised.value)
    assert str(raised.value).endswith("^")


def test_a_plan_in_a_file_is_named_with_its_lines(tmp_path: Path) -> None:
    file = tmp_path / "plan"
    file.write_text("# of a test\nalloc@1=oom\nlaunch@1=nothing\n")
    with pytest.raises(RuntimeError, match="plan:3:10: 'nothing' is nothing that can happen"):
        _C.check_fault_plan(f"@{file}")
    with pytest.raises(RuntimeError, match="Name a file that holds a plan"):
        _C.check_fault_plan(f"@{tmp_path / 'none'}")


def test_a_program_with_a_wrong_plan_does_not_begin() -> None:
    ended = run_alone(PRODUCTS, VNPU_FAULTS="lunch@1=oom")
    assert ended.status != 0
    assert "Did you mean 'launch'?" in ended.output


REDUCE = """
x = torch.full((1000,), float(rank + 1)).npu()
for _ in range(3):
    dist.all_reduce(x)
print("sum", float(x.sum().cpu()))
"""


@pytest.mark.parametrize(
    ("phase", "action"),
    [
        ("put", "throw"),
        ("get", "die"),
        *(
            pytest.param(phase, action, marks=pytest.mark.thorough)
            for phase in ("join", "put", "meet", "get", "end")
            for action in ("throw", "oom", "die")
            if (phase, action) not in (("put", "throw"), ("get", "die"))
        ),
    ],
)
def test_a_rank_that_fails_in_a_phase_of_a_collective_ends_both(phase: str, action: str) -> None:
    # A rank may end after its last part in a collective; the others then have their result.
    plan = f"rank=1;collective:all_reduce@2.{phase}={action}"
    ended = run_ranks(REDUCE, 2, VNPU_FAULTS=plan, HCCL_EXEC_TIMEOUT="20")
    assert ended[1].status != 0
    assert "VNPU_FAULTS" in ended[1].output
    assert ended[0].status != 0, ended[0].output[-2000:]
    assert "rank 1 (pid" in ended[0].output, ended[0].output[-2000:]
    assert not any("sum" in each.stdout for each in ended)


@pytest.mark.parametrize(
    ("fault", "rank", "told"),
    [
        ("open@1=gone", 1, "no longer offers the group"),
        ("map@1=truncated", 1, "for a group of 2 ranks: its file is too short"),
        pytest.param("create@1=oom", 0, "memory", marks=pytest.mark.thorough),
        pytest.param("open@1=throw", 1, "VNPU_FAULTS", marks=pytest.mark.thorough),
        pytest.param("map@1=oom", 0, "memory", marks=pytest.mark.thorough),
    ],
)
def test_ranks_whose_shared_memory_is_gone_or_too_short_say_so(fault, rank, told):
    plan = f"rank={rank};segment:{fault}"
    ended = run_ranks(REDUCE, 2, VNPU_FAULTS=plan, HCCL_CONNECT_TIMEOUT="4", HCCL_EXEC_TIMEOUT="20")
    assert all(each.status != 0 for each in ended), ended
    assert f"VNPU_FAULTS: segment:{fault} at" in ended[rank].output
    assert told in ended[rank].output, ended[rank].output[-3000:]
    assert not any("sum" in each.stdout for each in ended)
