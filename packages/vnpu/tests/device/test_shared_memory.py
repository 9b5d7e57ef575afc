"""Two processes share tensors and events by torch's own mechanism."""

from pathlib import Path

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
    """Runs two programs, whose `put` and `get` pass objects; returns the lines that each prints."""
    programs = [
        EXCHANGE + f"place = pathlib.Path({str(place)!r})\n" + each for each in (producer, consumer)
    ]
    ended = run_together(programs, [variables] * 2)
    assert [each.status for each in ended] == [0, 0], [each.output[-2000:] for each in ended]
    return [each.stdout.splitlines() for each in ended]


def test_accesses_to_another_processs_tensor_follow_earlier_launches(tmp_path: Path):
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
        try:
            torch.npu.Event().ipc_handle()
        except RuntimeError as error:
            print("ACL_EVENT_IPC" in str(error))
        """
    )
    expected = ["room for a key of 64", "flags 4", "byte 512 of", "0 ", "SetImportPid", "0 "]
    expected += ["has not exported", "True"]
    lines = [line for line in lines if line.strip()]
    assert len(lines) == len(expected), lines
    for line, part in zip(lines, expected, strict=True):
        assert part in line
