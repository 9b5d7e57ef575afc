"""Sizes near the largest integer are refused, and the next call works."""

from vllm_davinci_testing.processes.forked import output_of

HOSTILE = """
import ctypes
import torch
torch.npu.set_device(0)
acl, op = ctypes.CDLL("libascendcl.so"), ctypes.CDLL("libopapi.so")
acl.aclGetRecentErrMsg.restype = ctypes.c_char_p
op.aclCreateTensor.restype = ctypes.c_void_p
address, free, total = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
U = ctypes.c_size_t

def free_bytes():
    assert acl.aclrtGetMemInfo(1, ctypes.byref(free), ctypes.byref(total)) == 0
    return free.value

def message():
    return acl.aclGetRecentErrMsg().decode()

def tensor(sizes, strides, offset=0, data=None):
    I = ctypes.c_int64 * len(sizes)
    pointer = op.aclCreateTensor(
        I(*sizes), ctypes.c_uint64(len(sizes)), 0, I(*strides) if strides else None,
        ctypes.c_int64(offset), 2, I(*sizes), ctypes.c_uint64(len(sizes)), data)
    return pointer
"""


def test_an_allocation_of_nearly_all_numbers_is_out_of_memory_and_takes_nothing() -> None:
    lines = output_of(
        HOSTILE
        + """
before = free_bytes()
for size in (2**64 - 100, 2**64 - 1, 2**63):
    print(acl.aclrtMalloc(ctypes.byref(address), U(size), 0), message())
    print(acl.aclrtMallocHost(ctypes.byref(address), U(size)), message())
assert free_bytes() == before
assert acl.aclrtMalloc(ctypes.byref(address), U(4096), 0) == 0
print(acl.aclrtMemset(address, U(2**64 - 1), 1, U(2**64 - 100)), message())
print(acl.aclrtMemcpy(address, U(2**64 - 1), address, U(2**64 - 100), 3), message())
assert acl.aclrtMemset(address, U(4096), 1, U(4096)) == 0
"""
    )
    assert len(lines) == 8
    assert all(line.split()[0] == "207001" for line in lines[:6]), lines
    assert all("memory" in line for line in lines[:6]), lines
    assert all(line.split()[0] in ("507015", "107000") for line in lines[6:]), lines


def test_a_tensor_whose_addresses_do_not_fit_into_64_bits_is_refused() -> None:
    lines = output_of(
        HOSTILE
        + """
data = torch.ones(64, device="npu").data_ptr()
data = ctypes.c_void_p(data)
for sizes, strides, offset in (
    ((2, 2), (2**61, 1), 0), ((3,), (2**62,), 0), ((2**40, 2**40), (1, 1), 0), ((-1,), (1,), 0),
    ((2,), (-(2**61),), 0), ((2,), (1,), 2**62), ((0, 2**62, 2**62), None, 0), ((1,), (1,), -2**60),
):
    assert tensor(sizes, strides, offset, data) is None, sizes
    print(message())
assert tensor((2, 2), (2, 1), 0, data) is not None
assert tensor((1, 8), (2**62, 1), 0, data) is not None  # a stride that nothing is reached by
print(torch.ones(4, device="npu").sum().item())
"""
    )
    assert len(lines) == 9
    assert all("does not fit into 64 bits" in line or "has size -1" in line for line in lines[:8])
    assert lines[8] == "4.0"
