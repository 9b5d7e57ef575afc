"""Device memory: each chip's sizes, and errors for accesses that a chip would not survive."""

import resource

import pytest
import torch

from vllm_davinci.vnpu import VirtualDeviceConfig
from vllm_davinci_testing.processes import programs
from vllm_davinci_testing.processes.forked import output_of, run_alone

RUNTIME = """
import ctypes
import torch
torch.npu.set_device(0)
acl = ctypes.CDLL("libascendcl.so")
acl.aclGetRecentErrMsg.restype = ctypes.c_char_p
H2D, D2H, D2D = 1, 2, 3

def allocate(size):
    address = ctypes.c_void_p()
    assert acl.aclrtMalloc(ctypes.byref(address), ctypes.c_size_t(size), 0) == 0
    return address

def copy(to, room, source, size, kind):
    return acl.aclrtMemcpy(to, ctypes.c_size_t(room), source, ctypes.c_size_t(size), kind)

host = ctypes.create_string_buffer(1 << 20)
"""


def printed(program: str, config: VirtualDeviceConfig | None = None) -> list[str]:
    """Returns the lines that RUNTIME and the program print."""
    return output_of(RUNTIME + program, config)


def test_memory_is_the_size_of_the_chip_and_allocations_count() -> None:
    torch.npu.set_device(0)
    free, total = torch.npu.mem_get_info()
    assert total == 64 * 2**30
    block = torch.empty(3 * 2**30, dtype=torch.int8, device="npu")
    after, _ = torch.npu.mem_get_info()
    assert free - after >= block.numel()


def test_a_chip_sized_tensor_of_zeros_takes_no_host_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    zeros = torch.zeros(40 * 2**30, dtype=torch.int8, device="npu")
    assert int(zeros[-1].cpu()) == 0
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 256 * 1024


def test_asking_for_more_than_the_chip_has_is_the_usual_out_of_memory_error() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.empty(65 * 2**30, dtype=torch.int8, device="npu")
    assert torch.ones(3, device="npu").cpu().tolist() == [1.0, 1.0, 1.0]


def test_a_small_device_runs_out_of_memory_early() -> None:
    lines = output_of(
        """
        import torch
        torch.npu.set_device(0)
        print(torch.npu.mem_get_info()[1])
        try:
            torch.empty(300 * 2**20, dtype=torch.int8, device="npu")
        except torch.OutOfMemoryError:
            print("out of memory")
        """,
        VirtualDeviceConfig(memory="256MiB"),
    )
    assert lines == [str(256 * 2**20), "out of memory"]


def test_host_code_that_follows_a_device_address_dies_with_the_allocations_history() -> None:
    done = run_alone(
        """
        import ctypes, torch
        tensor = torch.ones(4, device="npu")
        ctypes.string_at(tensor.data_ptr(), 4)
        """
    )
    assert done.status == -11
    assert "host code touched device memory" in done.stderr
    assert "of allocation #" in done.stderr
    assert "live" in done.stderr


def test_use_after_free_is_an_error_that_names_the_allocation() -> None:
    lines = printed(
        """
a = allocate(4096)
assert copy(a, 4096, host, 4096, H2D) == 0
assert acl.aclrtFree(a) == 0
print(copy(a, 4096, host, 4096, H2D))
print(acl.aclGetRecentErrMsg().decode())
"""
    )
    assert lines[0] == "507015"
    assert "freed (use after free)" in lines[1]
    assert "4096 bytes" in lines[1]


def test_a_copy_that_leaves_its_allocation_is_an_error() -> None:
    lines = printed(
        """
a = allocate(4096)
print(copy(a, 8192, host, 8192, H2D), acl.aclGetRecentErrMsg().decode())
print(copy(a, 4096, host, 8192, H2D), acl.aclGetRecentErrMsg().decode())
"""
    )
    assert "507015" in lines[0]
    assert "does not lie within one live allocation" in lines[0]
    assert "107000" in lines[1]
    assert "room for 4096" in lines[1]


def test_a_stream_refuses_a_copy_in_the_wrong_direction_and_the_host_finds_it() -> None:
    lines = printed(
        """
a, size = allocate(4096), ctypes.c_size_t(4096)
host[0] = b"x"
print(copy(a, 4096, host, 4096, D2H), copy(host, 4096, a, 4096, H2D), host[0])
print(acl.aclrtMemcpyAsync(host, size, a, size, H2D, None), acl.aclGetRecentErrMsg().decode())
print(copy(host, 4096, a, 4096, 9))
"""
    )
    assert lines[0] == "0 0 b'x'"
    assert lines[1].startswith("107000 ") and "direction" in lines[1]
    assert lines[2] == "107000"


def test_freeing_twice_is_an_error() -> None:
    lines = printed(
        """
a = allocate(4096)
print(acl.aclrtFree(a), acl.aclrtFree(a), acl.aclGetRecentErrMsg().decode())
"""
    )
    assert lines[0].startswith("0 107000")
    assert "no allocation starts at" in lines[0]


def test_freed_memory_is_not_handed_out_again_at_once() -> None:
    lines = printed(
        """
first = allocate(4096)
acl.aclrtFree(first)
print(allocate(4096).value != first.value)
"""
    )
    assert lines == ["True"]


def test_expandable_segments_grow_and_shrink() -> None:
    lines = programs.output_of(
        """
        import torch
        blocks = [torch.full((n, 2**20), n, dtype=torch.uint8, device="npu") for n in (3, 40, 7)]
        total = sum(int(block.to(torch.int64).sum().cpu()) for block in blocks)
        print(total == sum(n * n * 2**20 for n in (3, 40, 7)))
        used = torch.npu.mem_get_info()[0]
        del blocks
        torch.npu.empty_cache()
        print(torch.npu.mem_get_info()[0] > used)
        """,
        PYTORCH_NPU_ALLOC_CONF="expandable_segments:True",
    )
    assert lines == ["True", "True"]


def test_pinned_memory_is_pinned_and_copies_to_the_device_and_back() -> None:
    pinned = torch.arange(1000, dtype=torch.int32).pin_memory()
    assert pinned.is_pinned()
    assert not torch.arange(10).is_pinned()
    there = pinned.to("npu", non_blocking=True)
    back = torch.empty(1000, dtype=torch.int32).pin_memory()
    back.copy_(there, non_blocking=True)
    torch.npu.synchronize()
    assert torch.equal(back, pinned)


def test_memory_of_the_host_may_be_registered_besides_and_takes_no_empty_range() -> None:
    """Registers memory that the device reads in place, as torch_npu does."""
    assert output_of(
        """
        import ctypes, gc, torch, torch_npu
        torch.npu.set_device(0)
        for _ in range(2):
            x = torch_npu.empty_with_swapped_memory([256], dtype=torch.float32, device="npu:0")
            x.fill_(3)
            print(x.sum().item())
            del x
            gc.collect()
        acl, memory = ctypes.CDLL("libascendcl.so"), ctypes.create_string_buffer(4096)
        print(acl.aclrtHostRegisterV2(memory, ctypes.c_uint64(0), 0),
              acl.aclrtHostRegisterV2(memory, ctypes.c_uint64(4096), 0),
              acl.aclrtHostUnregister(memory), acl.aclrtHostUnregister(memory))
        """
    ) == ["768.0", "768.0", "107000 0 0 107000"]


def test_memory_of_the_host_that_the_runtime_knows_can_be_filled() -> None:
    lines = printed(
        """
pinned = ctypes.c_void_p()
assert acl.aclrtMallocHost(ctypes.byref(pinned), ctypes.c_size_t(4096)) == 0
size, stream = ctypes.c_size_t(4096), ctypes.c_void_p(torch.npu.current_stream().npu_stream)
for fill in (acl.aclrtMemset, lambda *fill: acl.aclrtMemsetAsync(*fill, stream)):
    for value in (7, 0):
        assert fill(pinned, size, value, size) == 0
        torch.npu.synchronize()
        print(set(ctypes.string_at(pinned, 4096)))
beyond = ctypes.c_size_t(8192)
print(acl.aclrtMemset(pinned, beyond, 1, beyond), acl.aclrtMemset(host, size, 1, size))
"""
    )
    assert lines == ["{7}", "{0}", "{7}", "{0}", "507015 507015"]


def test_freeing_while_a_stream_hangs_does_not_wait_for_it() -> None:
    lines = printed(
        """
import time
acl.aclrtMemsetAsync.argtypes = None
stream, gate, used = ctypes.c_void_p(), allocate(512), allocate(1 << 20)
others = [allocate(4096) for _ in range(10)]
assert acl.aclrtMemset(gate, ctypes.c_size_t(512), 0, ctypes.c_size_t(512)) == 0
assert acl.aclrtMemset(used, ctypes.c_size_t(1 << 20), 5, ctypes.c_size_t(1 << 20)) == 0
assert acl.aclrtCreateStream(ctypes.byref(stream)) == 0
assert acl.aclrtValueWait(gate, ctypes.c_uint64(1), 1, stream) == 0
pinned = ctypes.c_void_p()
assert acl.aclrtMallocHost(ctypes.byref(pinned), ctypes.c_size_t(1 << 20)) == 0
size = ctypes.c_size_t(1 << 20)
assert acl.aclrtMemcpyAsync(pinned, size, used, size, D2H, stream) == 0
begin = time.monotonic()
for address in [used, *others]:
    assert acl.aclrtFree(address) == 0
print(time.monotonic() - begin)
assert acl.aclrtValueWrite(gate, ctypes.c_uint64(1), 0, None) == 0
assert acl.aclrtSynchronizeDevice() == 0
print(set(ctypes.string_at(pinned, 1 << 20)))
assert acl.aclrtFree(gate) == 0
""",
        VirtualDeviceConfig(wait_limit=60),
    )
    assert float(lines[0]) < 15
    assert lines[1] == "{5}"


def test_physical_memory_that_is_freed_twice_or_used_after_is_an_error() -> None:
    lines = printed(
        """
class Location(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint32), ("type", ctypes.c_int)]

class Property(ctypes.Structure):
    _fields_ = [("handle", ctypes.c_int), ("allocation", ctypes.c_int), ("attribute", ctypes.c_int),
                ("location", Location), ("reserve", ctypes.c_uint64)]

handle, wanted = ctypes.c_void_p(), Property(location=Location(0, 1))
size = ctypes.c_size_t(2 << 20)
assert acl.aclrtMallocPhysical(ctypes.byref(handle), size, ctypes.byref(wanted), 0) == 0
assert acl.aclrtFreePhysical(handle) == 0
shared = ctypes.c_uint64()
print(acl.aclrtFreePhysical(handle), acl.aclGetRecentErrMsg().decode())
print(acl.aclrtMemExportToShareableHandle(handle, 0, 0, ctypes.byref(shared)))
print(acl.aclrtFreePhysical(ctypes.c_void_p(1)))
"""
    )
    assert lines[0].startswith("107017 ")
    assert "freed twice" in lines[0]
    assert lines[1:] == ["107017", "107017"]
