"""Tensors and events that two processes share by torch's own mechanism."""

from pathlib import Path

import pytest

from vllm_davinci_testing.processes.forked import output_of, run_together

EXCHANGE = """
import os, pathlib, pickle, time
import torch
from torch.multiprocessing.reductions import reduce_tensor
torch.npu.set_device(0)

def put(name, value):
    written = place / (name + ".part")
    written.write_bytes(pickle.dumps(value))
    written.rename(place / name)

def get(name):
    limit = time.monotonic() + 100
    while not (place / name).exists():
        assert time.monotonic() < limit, name
        time.sleep(0.005)
    return pickle.loads((place / name).read_bytes())
"""


def run_pair(producer: str, consumer: str, place: Path, **variables: str) -> list[list[str]]:
    """The lines printed by each program; both have `put` and `get`, which pass objects."""
    programs = [
        EXCHANGE + f"place = pathlib.Path({str(place)!r})\n" + each for each in (producer, consumer)
    ]
    ended = run_together(programs, [variables] * 2)
    assert [each.status for each in ended] == [0, 0], [each.output[-2000:] for each in ended]
    return [each.stdout.splitlines() for each in ended]


def test_a_tensor_of_another_process_is_read_and_written_behind_what_was_launched(tmp_path: Path):
    producer, consumer = run_pair(
        """
x = torch.ones(512, 512, device="npu")
both = torch.zeros(2, 300_000, device="npu")
torch.npu.synchronize()
free, _ = torch.npu.mem_get_info()
for _ in range(40):
    x = (x @ x).clamp_(max=3)
both[1].add_(x[0, 0])
put("tensors", [reduce_tensor(both[1]), reduce_tensor(both[0])])
get("written")
print(both[0, :3].tolist(), both[1, -2:].tolist())
print(torch.npu.mem_get_info()[0] <= free)
put("seen", 1)
get("closed")
""",
        """
first, second = (rebuild(*arguments) for rebuild, arguments in get("tensors"))
print(first.shape, first.min().item(), first.max().item(), second.abs().max().item())
first[-1] = 8
second[1] = 9
torch.npu.synchronize()
put("written", 1)
get("seen")
del first, second
torch.npu.synchronize()
torch.npu.ipc_collect()
put("closed", 1)
""",
        tmp_path,
        VNPU_SCHEDULE="threads",
    )
    assert consumer == ["torch.Size([300000]) 3.0 3.0 0.0"]
    assert producer == ["[0.0, 9.0, 0.0] [3.0, 8.0]", "True"]


def test_a_wait_for_a_process_that_ends_before_its_record_names_it(tmp_path: Path):
    _, consumer = run_pair(
        """
event = torch.npu.Event(interprocess=True)
x = torch.ones(1024, 1024, device="npu")
for _ in range(600):
    x = (x @ x).clamp_(max=3)
event.record()
put("event", (event.ipc_handle(), os.getpid()))
get("waits")
os._exit(0)
""",
        """
handle, pid = get("event")
event = torch.npu.Event.from_ipc_handle(torch.device("npu", 0), handle)
event.wait()
print(event.query())
put("waits", 1)
try:
    torch.npu.synchronize()
except RuntimeError as error:
    print(f"process {pid} shares will not come: the process has ended" in str(error))
os._exit(0)
""",
        tmp_path,
        VNPU_SCHEDULE="threads",
    )
    assert consumer == ["False", "True"]


def test_unsupported_sharing_is_refused_with_the_remedy():
    lines = output_of(
        """
        import ctypes
        import torch
        torch.npu.set_device(0)
        acl = ctypes.CDLL("libascendcl.so")
        acl.aclGetRecentErrMsg.restype = ctypes.c_char_p
        address, key = ctypes.c_void_p(), ctypes.create_string_buffer(65)
        size = ctypes.c_size_t(1 << 20)
        assert acl.aclrtMalloc(ctypes.byref(address), size, 0) == 0

        def tell(status):
            print(status, acl.aclGetRecentErrMsg().decode() if status else "")

        export, flag = acl.aclrtIpcMemGetExportKey, ctypes.c_uint64
        tell(export(address, size, key, ctypes.c_size_t(64), flag(0)))
        tell(export(address, size, key, ctypes.c_size_t(65), flag(4)))
        tell(export(ctypes.c_void_p(address.value + 512), size, key, ctypes.c_size_t(65), flag(0)))
        tell(export(address, size, key, ctypes.c_size_t(65), flag(0)))
        tell(acl.aclrtIpcMemImportByKey(ctypes.byref(ctypes.c_void_p()), key, flag(0)))
        tell(acl.aclrtIpcMemClose(key))
        tell(acl.aclrtIpcMemClose(b"a key of mine"))
        granularity = ctypes.c_size_t()
        properties = ctypes.create_string_buffer(64)
        tell(acl.aclrtMemGetAllocationGranularity(properties, 0, ctypes.byref(granularity)))
        print(granularity.value)
        tell(acl.aclrtMemGetAllocationGranularity(properties, 7, ctypes.byref(granularity)))
        try:
            torch.npu.Event().ipc_handle()
        except RuntimeError as error:
            print("ACL_EVENT_IPC" in str(error))
        """
    )
    expected = ["room for a key of 64", "flags 4", "byte 512 of", "0 ", "SetImportPid", "0 "]
    expected += ["has not exported", "0 ", "2097152", "option 7", "True"]
    lines = [line for line in lines if line.strip()]
    assert len(lines) == len(expected), lines
    for line, part in zip(lines, expected, strict=True):
        assert part in line


ACL = """
import ctypes
acl = ctypes.CDLL("libascendcl.so")
acl.aclGetRecentErrMsg.restype = ctypes.c_char_p
size_t, pointer, ref = ctypes.c_size_t, ctypes.c_void_p, ctypes.byref

def tell(status):
    print(status, acl.aclGetRecentErrMsg().decode() if status else "")
"""
MAPPED = """
class Properties(ctypes.Structure):
    _fields_ = [("handle", ctypes.c_int), ("kind", ctypes.c_int), ("attribute", ctypes.c_int),
                ("place", ctypes.c_uint32 * 2), ("reserved", ctypes.c_uint64)]

class Rights(ctypes.Structure):
    _fields_ = [("flags", ctypes.c_int), ("place", ctypes.c_uint32 * 2),
                ("reserved", ctypes.c_uint8 * 12)]

SIZE = 2 << 20

def mapped(handle):
    address = pointer()
    assert acl.aclrtReserveMemAddress(ref(address), size_t(SIZE), size_t(0), None, 0) == 0
    assert acl.aclrtMapMem(address, size_t(SIZE), size_t(0), handle, 0) == 0
    return address

def copy(to, source, kind):
    assert acl.aclrtMemcpy(to, size_t(SIZE), source, size_t(5), kind) == 0
"""


@pytest.mark.parametrize("kind", [1, 2], ids=["default", "fabric"])
def test_physical_memory_is_shared_by_both_forms_of_a_handle(tmp_path: Path, kind: int):
    producer, consumer = run_pair(
        ACL + MAPPED + f"KIND = {kind}\n"
        """
handle, properties = pointer(), Properties(0, 0, 4, (ctypes.c_uint32 * 2)(0, 1), 0)
properties.place[0], properties.place[1] = 0, 1
assert acl.aclrtMallocPhysical(ref(handle), size_t(SIZE), ref(properties), ctypes.c_uint64(0)) == 0
address, shared = mapped(handle), ctypes.create_string_buffer(128)
copy(address, b"first", 1)
export, flag = acl.aclrtMemExportToShareableHandleV2, ctypes.c_uint64
tell(export(handle, flag(0), KIND, shared))
tell(export(handle, flag(1), 3, shared))
tell(export(handle, flag(1), KIND, shared))
rights = Rights(3)
rights.place[0], rights.place[1] = 0, 1
tell(acl.aclrtMemSetAccess(address, size_t(SIZE), ref(rights), size_t(1)))
tell(acl.aclrtMemSetAccess(address, size_t(SIZE // 2), ref(rights), size_t(1)))
rights.flags = 1
tell(acl.aclrtMemSetAccess(address, size_t(SIZE), ref(rights), size_t(1)))
put("shared", shared.raw)
get("written")
seen = ctypes.create_string_buffer(5)
copy(seen, address, 2)
print(seen.raw.decode())
""",
        ACL + MAPPED + f"KIND = {kind}\n"
        """
shared, handle = ctypes.create_string_buffer(get("shared"), 128), pointer()
load, flag = acl.aclrtMemImportFromShareableHandleV2, ctypes.c_uint64
tell(load(shared, KIND, flag(1), ref(handle)))
tell(load(shared, KIND, flag(0), ref(handle)))
address, seen = mapped(handle), ctypes.create_string_buffer(5)
copy(seen, address, 2)
print(seen.raw.decode())
copy(address, b"other", 1)
put("written", 1)
""",
        tmp_path,
    )
    said = [line.partition(" ") for line in producer[:6]]
    assert [status for status, _, _ in said if status == "0"] == ["0", "0"]
    assert [status == "0" for status, _, _ in said] == [False, False, True, True, False, False]
    assert "DISABLE_PID_VALIDATION (1)" in said[0][2]
    assert "1 (default) or 2 (fabric)" in said[1][2]
    assert "one mapping" in said[4][2]
    assert "devices read and write all that is mapped" in said[5][2]
    assert producer[6] == "other"
    assert consumer[0].startswith("1") and "give 0" in consumer[0]
    assert consumer[1:] == ["0 ", "first"]
