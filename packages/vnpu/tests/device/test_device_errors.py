"""Device errors in CANN's state model, and how abandoned tasks end.

Recovery is tested through torch_npu's own functions.
"""

import pytest

from vllm_davinci_testing.processes.forked import output_of
from vllm_davinci_testing.processes.ranks import run_ranks

SCHEDULES = [
    "eager",
    *(pytest.param(name, marks=pytest.mark.thorough) for name in ("threads", "fuzz:7")),
]
RUNTIME = """
import ctypes
import threading
import torch
torch.npu.set_device(0)
acl = ctypes.CDLL("libascendcl.so")
acl.aclGetRecentErrMsg.restype = ctypes.c_char_p
address = ctypes.c_void_p()
size = ctypes.c_size_t(8192)
assert acl.aclrtMalloc(ctypes.byref(address), size, 0) == 0
first, second = ctypes.c_void_p(), ctypes.c_void_p()
for each in (first, second):
    assert acl.aclrtCreateStream(ctypes.byref(each)) == 0

def fill(stream=None):
    return acl.aclrtMemsetAsync(address, size, 1, size, stream)
"""
NOT_REPAIRED = (
    "vnpu: only errors of device memory can be repaired (type 1), not one of type 3. Start the "
    "process again."
)
# Laid out as in acl_rt.h.
ERRORS = """
class MemoryInfo(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("bytes", ctypes.c_size_t),
                ("reserved", ctypes.c_size_t * 14)]

class MemoryInfos(ctypes.Structure):
    _fields_ = [("count", ctypes.c_size_t), ("infos", MemoryInfo * 20)]

class ErrorInfo(ctypes.Structure):
    _fields_ = [("try_repair", ctypes.c_uint8), ("has_detail", ctypes.c_uint8),
                ("reserved", ctypes.c_uint8 * 2), ("type", ctypes.c_int), ("memory", MemoryInfos)]

def error():
    info = ErrorInfo()
    assert acl.aclrtGetErrorVerbose(0, ctypes.byref(info)) == 0
    return info

def bad_memory():
    infos, count = (MemoryInfo * 128)(), ctypes.c_size_t()
    assert acl.aclrtGetMemUceInfo(0, infos, 128, ctypes.byref(count)) == 0
    return [(each.address - address.value, each.bytes) for each in infos[:count.value]], infos
"""


def test_a_thread_peeks_at_its_last_error_and_takes_it() -> None:
    assert output_of(
        RUNTIME
        + """
print(acl.aclrtPeekAtLastError(0), acl.aclrtGetLastError(0), acl.aclrtSetDevice(99))
print(acl.aclrtPeekAtLastError(0), acl.aclrtPeekAtLastError(0))
other = threading.Thread(target=lambda: print(acl.aclrtPeekAtLastError(0)))
other.start()
other.join()
print(acl.aclrtGetLastError(0), acl.aclrtGetLastError(0))
"""
    ) == ["0 0 107001", "107001 107001", "0", "107001 0"]


@pytest.mark.refused_calls
def test_a_refused_operator_leaves_the_last_error_of_the_runtime_alone() -> None:
    # After this refusal torch_npu asks for the last error, and would report that instead.
    lines = output_of(
        RUNTIME
        + """
import torch_npu
try:
    torch_npu.npu_rms_norm(torch.ones(2, 8).npu(), torch.ones(4).npu())
except RuntimeError as refused:
    print("161002" in str(refused))
print(acl.aclrtPeekAtLastError(0))
"""
    )
    assert lines == ["True", "0"]


def test_a_device_returns_its_newest_error_and_repairs_memory() -> None:
    lines = output_of(
        RUNTIME
        + ERRORS
        + """
def fail():
    assert fill(first) == 0
    status = acl.aclrtSynchronizeStream(first)
    info = error()
    print(status, info.type, info.try_repair, info.has_detail, bad_memory()[0])
    return info

print(error().type)
print(acl.aclrtRepairError(0, ctypes.byref(fail())), acl.aclGetRecentErrMsg().decode())
fail()
info = fail()
print(info.memory.count, info.memory.infos[0].address == address.value)
print(acl.aclrtRepairError(0, ctypes.byref(info)), error().type, bad_memory()[0])
fail()
ranges, infos = bad_memory()
print(acl.aclrtMemUceRepair(0, infos, ctypes.c_size_t(len(ranges))), error().type, bad_memory()[0])
print(fill(first), acl.aclrtSynchronizeStream(first), acl.aclrtGetErrorVerbose(99, None))
""",
        VNPU_FAULTS=";".join(
            f"launch:memory fill@{number}=async:{status}"
            for number, status in enumerate((507035, 507056, 507053, 507054), 1)
        ),
    )
    assert lines == [
        "0",
        "507035 3 0 1 []",
        f"207000 {NOT_REPAIRED} [aclrtRepairError]",
        "507056 4 0 0 []",
        "507053 1 1 1 [(0, 4096)]",
        "1 True",
        "0 0 []",
        "507054 1 1 1 [(0, 4096)]",
        "0 0 []",
        "0 0 107001",
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tasks_of_a_stream_are_abandoned(schedule: str) -> None:
    lines = output_of(
        RUNTIME
        + """
event = ctypes.c_void_p()
assert acl.aclrtCreateEventExWithFlag(ctypes.byref(event), 1) == 0
assert [fill(first), fill(first), acl.aclrtRecordEvent(event, first)] == [0, 0, 0]
assert acl.aclrtStreamWaitEvent(second, event) == 0 and fill(second) == 0
print(acl.aclrtSynchronizeStreamWithTimeout(first, 200))
waits = []
host = threading.Thread(target=lambda: waits.append(acl.aclrtSynchronizeStream(first)))
host.start()
print(acl.aclrtStreamAbort(first), acl.aclrtStreamAbort(None))
host.join(10)
print(waits, acl.aclrtSynchronizeEvent(event), acl.aclrtSynchronizeStream(second))
print(fill(first), acl.aclrtSynchronizeStream(first))
""",
        VNPU_FAULTS="launch:memory fill@1=async:hang",
        VNPU_SCHEDULE=schedule,
        VNPU_WAIT_LIMIT="20",
    )
    # The waiting tasks have no input. The host's wait returns the error even if it started before
    # all tasks had ended.
    assert lines == ["507046", "0 107000", "[107023] 107023 107023", "0 0"]


RECOVERY = """
import torch
import torch_npu
import threading
torch.npu.set_device(0)
x = torch.ones(64, 64, device="npu")
torch.npu.synchronize()

def failed(work):
    try:
        work()
        torch.npu.synchronize()
    except RuntimeError as error:
        return str(error)
    return "nothing"
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_torch_npu_stops_a_device_that_hangs_and_starts_it_again(schedule: str) -> None:
    lines = output_of(
        RECOVERY
        + """
stopper = threading.Timer(0.5, lambda: print("stopped", torch.npu.stop_device(0)))
stopper.start()
text = failed(lambda: x @ x)
stopper.join()
print("FORCE STOP" in text, "107022" in text)
print("FORCE STOP" in failed(lambda: x + 1))
torch.npu.restart_device(0)
print(float((x @ x).sum().cpu()), failed(lambda: x @ x))
""",
        VNPU_FAULTS="launch:aclnnMatmul@1=async:hang",
        VNPU_SCHEDULE=schedule,
        VNPU_WAIT_LIMIT="20",
    )
    assert lines == ["stopped 0", "True True", "True", "262144.0 nothing"]


def test_torch_npu_finds_and_repairs_an_error_of_memory() -> None:
    lines = output_of(
        RECOVERY
        + """
y = torch.empty_like(x)
text = failed(lambda: torch.matmul(x, x, out=y))
[found] = torch_npu._C._npu_get_uce_addr()
print("UCE ERROR" in text, found["ptr"] == y.data_ptr(), found["size"])
# 3: memory that a tensor has.
print(torch.npu.check_uce_in_memory(0), torch.npu.stop_device(0))
torch.npu.restart_device(0)
print(torch_npu._C._npu_get_uce_addr(), float((x @ x).sum().cpu()))
print("HCCS LINK ERROR" in failed(lambda: x @ x))
""",
        VNPU_FAULTS="launch:aclnnMatmul@1=async:507053;launch:aclnnMatmul@3=async:507056",
    )
    assert lines == ["True True 4096", "3 0", "[] 262144.0", "True"]


# Sometimes the ranks do not meet again within 20 s, for an unknown reason.
@pytest.mark.nightly("faults")
def test_ranks_that_stopped_their_devices_make_their_group_anew() -> None:
    ended = run_ranks(
        """
import threading
import torch_npu
x = torch.full((1000,), float(rank + 1)).npu()
dist.all_reduce(x)
torch.npu.synchronize()
# The device of rank 1 hangs until it is stopped, of which rank 0 hears.
if rank == 1:
    stopper = threading.Timer(1.0, torch.npu.stop_device, [rank])
    stopper.start()
try:
    if rank == 1:
        x @ x
    dist.all_reduce(x)
    torch.npu.synchronize()
except RuntimeError as error:
    print("FORCE STOP" in str(error), "rank 1" in str(error) and "gave up" in str(error))
stopper.join() if rank == 1 else torch.npu.stop_device(rank)
torch.npu.restart_device(rank)
torch_npu.distributed.reinit_process_group(rebuild_link=True)
x = torch.full((1000,), float(rank + 1)).npu()
dist.all_reduce(x)
print("sum", float(x.sum().cpu()))
dist.destroy_process_group()
""",
        2,
        VNPU_FAULTS="rank=1;launch:aclnnMatmul@1=async:hang",
        VNPU_WAIT_LIMIT="30",
        HCCL_EXEC_TIMEOUT="20",
        HCCL_CONNECT_TIMEOUT="20",
    )
    assert [each.status for each in ended] == [0, 0], ended
    assert "False True\nsum 3000.0" in ended[0].output
    assert "True False\nsum 3000.0" in ended[1].output
