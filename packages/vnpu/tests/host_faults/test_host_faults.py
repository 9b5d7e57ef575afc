"""In programs under `vnpu run`, C library calls fail and clocks jump according to a plan."""

import struct
import subprocess
import time
from pathlib import Path

import pytest

from vllm_davinci.vnpu import _C, VirtualDeviceConfig
from vllm_davinci_testing.processes.forked import run_alone
from vllm_davinci_testing.processes.programs import run_program

LIMIT_S = 120.0  # the start of an interpreter with torch, on a busy machine
NAMES = ("malloc", "open", "write", "fsync", "monotonic", "realtime")
FILES = """
import os

def attempt(call, *arguments):
    try:
        return call(*arguments)
    except OSError as error:
        print(error.strerror)

file = os.memfd_create("file")
for _ in range(3):
    print("wrote", attempt(os.write, file, b"x"))
attempt(os.fsync, file)
print("file", os.fstat(file).st_size)
"""
DEVICE = """
import torch
x = torch.arange(4096.0).npu()
for _ in range(3):
    x = x * 0.5
print("answer", float(x.sum().cpu()))
"""
# Uses only the runtime, because importing torch takes most of a program's time.
FILLING = """
import ctypes
acl = ctypes.CDLL("libascendcl.so")
acl.aclGetRecentErrMsg.restype = ctypes.c_char_p
address, size = ctypes.c_void_p(), ctypes.c_size_t(4096)
assert acl.aclInit(None) == 0
assert acl.aclrtSetDevice(0) == 0
assert acl.aclrtMalloc(ctypes.byref(address), size, 0) == 0
assert acl.aclrtMemsetAsync(address, size, 1, size, None) == 0
status = acl.aclrtSynchronizeDevice()
print(status, acl.aclGetRecentErrMsg().decode() if status else "", flush=True)
"""
PARTS = 24
ANSWER = "answer 1048320.0"


def run(source: str, plan: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a program under a plan, as `vnpu run --faults` does."""
    return run_program(source, VirtualDeviceConfig(faults=plan), **variables)


def counts_of(source: str, directory: Path) -> list[dict[str, int]]:
    """Counts how often a program's processes reach each point."""
    assert run(source, f"count:{directory}").returncode == 0
    counts = [struct.unpack("=q6Q", file.read_bytes())[1:] for file in directory.glob("*.host")]
    return [dict(zip(NAMES, each, strict=True)) for each in counts]


def test_writes_and_syncs_fail_once_and_the_rest_is_written() -> None:
    ended = run(FILES, "host:write@2=ENOSPC;host:fsync@1=EIO")
    assert ended.stdout.splitlines() == [
        "wrote 1", "No space left on device", "wrote None", "wrote 1", "Input/output error",
        "file 2",
    ]  # fmt: skip
    assert "VNPU_FAULTS: host:write@2=ENOSPC at host:write in rank" in ended.stderr
    assert ended.stderr.count("VNPU_FAULTS:") == 2


def test_without_free_descriptors_nothing_is_opened(tmp_path: Path) -> None:
    program = "for _ in range(9):\n    open('/dev/null').close()\n    print('opened', flush=True)"
    opens = max(each["open"] for each in counts_of(program, tmp_path))
    ended = run(program, f"host:open@{opens - 3}+=EMFILE")
    assert ended.returncode == 1
    assert 0 < ended.stdout.count("opened") < 9
    assert "[Errno 24] Too many open files: '/dev/null'" in ended.stderr


def test_calls_are_counted_by_process(tmp_path: Path) -> None:
    counts = counts_of(FILES, tmp_path)
    assert any(each["write"] == 3 and each["fsync"] == 1 for each in counts), counts
    assert all(each["malloc"] > 100 for each in counts)


def test_a_forked_child_counts_its_own_calls() -> None:
    program = """
    import os
    file = os.memfd_create("file")
    os.write(file, b"parent's")
    if os.fork() == 0:
        for _ in range(2):
            try:
                print("wrote", os.write(file, b"child"), flush=True)
            except OSError as error:
                print(error.strerror, flush=True)
        os._exit(0)
    os.wait()
    """
    ended = run(program, "host:write@2=ENOSPC")
    assert ended.stdout.splitlines() == ["wrote 5", "No space left on device"]


def test_a_wait_whose_clock_jumps_ends_with_the_limit_that_it_names() -> None:
    begin = time.monotonic()
    ended = run(
        FILLING,
        # Each reading adds a second, so reading the clock uses up the limit of 600 s.
        "launch:memory fill@1=async:hang;clock:monotonic@1+=jump:1s",
        VNPU_WAIT_LIMIT="600",
    )
    assert time.monotonic() - begin < LIMIT_S
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.startswith("507046 vnpu: waited 600000 ms"), ended.stdout


def test_a_wait_succeeds_if_only_the_clock_jumps() -> None:
    ended = run(FILLING, "clock:monotonic@1+=jump:1s", VNPU_WAIT_LIMIT="600")
    assert (ended.returncode, ended.stdout.strip()) == (0, "0"), ended.stderr[-2000:]


@pytest.mark.parametrize("jump", ["-3600s", "3600s"])
@pytest.mark.parametrize(
    ("source", "answer"),
    [
        pytest.param(FILLING, "0", id="runtime"),
        pytest.param(DEVICE, ANSWER, id="torch", marks=pytest.mark.thorough),
    ],
)
def test_a_wall_clock_that_is_set_changes_nothing(source: str, answer: str, jump: str) -> None:
    ended = run(source, f"clock:realtime@1+=jump:{jump}", VNPU_WAIT_LIMIT="20")
    assert (ended.returncode, ended.stdout.strip()) == (0, answer), ended.stderr[-2000:]


@pytest.fixture(scope="module")
def calls_of_device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Returns how often the program with a device reaches each point."""
    counts = counts_of(DEVICE, tmp_path_factory.mktemp("device"))
    return {name: max(each[name] for each in counts) for name in NAMES}


@pytest.mark.thorough
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", ["malloc", "open"])
def test_a_program_without_memory_or_descriptors_answers_rightly_or_fails(
    name: str, part: int, calls_of_device: dict[str, int]
) -> None:
    calls = calls_of_device[name]
    # All calls from `first` on fail, as on a machine without free memory. Torch and the device make
    # the second half of the calls.
    first = max(1, calls - calls * part // PARTS // 2 - 1)
    ended = run(DEVICE, f"host:{name}@{first}+={'ENOMEM' if name == 'malloc' else 'EMFILE'}")
    if ended.returncode == 0:
        assert ended.stdout.strip() == ANSWER
    else:
        assert ANSWER not in ended.stdout or "VNPU_FAULTS" in ended.stderr
        assert "VNPU_FAULTS: host:" in ended.stderr


@pytest.mark.parametrize(
    ("plan", "what"),
    [
        ("host:wrte@1=EIO", "Did you mean 'write'?"),
        ("host:write@1=throw", "a call of the host takes ENOSPC"),
        ("clock:monotonic@1=oom", "a clock jumps"),
        ("clock:monotonc@1=jump:1s", "Did you mean 'monotonic'?"),
        ("launch@1=ENOSPC", "an errno is for calls of the host"),
        ("launch@1=jump:5s", "jump is for a clock"),
        ("clock@1=jump:5", "expected ms or s"),
    ],
)
def test_a_plan_for_the_host_that_is_wrong_is_refused(plan: str, what: str) -> None:
    with pytest.raises(RuntimeError) as raised:
        _C.check_fault_plan(plan)
    assert what in str(raised.value)


def test_rules_that_cannot_hold_are_refused() -> None:
    ended = run_alone("import torch\ntorch.ones(1).npu()", VNPU_FAULTS="host:write@1=EIO")
    assert ended.status != 0
    assert "started by `vnpu run --faults PLAN -- COMMAND`" in ended.output
