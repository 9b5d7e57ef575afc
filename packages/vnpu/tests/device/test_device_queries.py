"""Questions of programs in C to the runtime: versions, features, streams, sums, allocators."""

from __future__ import annotations

import pytest

from vllm_davinci.vnpu import VirtualDeviceConfig
from vllm_davinci_testing.processes.forked import output_of

PREAMBLE = """
import ctypes, torch, torch_npu
torch.npu.set_device(0)
acl, number = ctypes.CDLL("libascendcl.so"), ctypes.c_int32(-1)
"""


def output_of_calls(code: str) -> list[str]:
    return output_of(PREAMBLE + code)


@pytest.mark.parametrize(("cann", "expected"), [("8.5", "80500000"), ("9.0", "90000000")])
def test_versions_are_numbers_that_grow_with_releases(cann: str, expected: str) -> None:
    lines = output_of(
        PREAMBLE + 'acl.aclsysGetVersionNum(b"runtime", ctypes.byref(number)); print(number.value)',
        VirtualDeviceConfig(cann=cann),
    )
    assert lines == [expected]


def test_chips_are_compatible_where_their_cores_are() -> None:
    lines = output_of_calls(
        """
for soc in (b"Ascend910B1", b"Ascend910_9391", b"Ascend310P3", b"none"):
    status = acl.aclrtCheckArchCompatibility(soc, ctypes.byref(number))
    print(status, number.value)
"""
    )
    assert lines[:3] == ["0 1", "0 1", "0 0"]
    assert not lines[3].startswith("0 ")


def test_features_are_there_or_not_and_others_are_unknown() -> None:
    lines = output_of_calls(
        """
for feature in (1, 21, 99):
    status = acl.aclrtGetDeviceCapability(0, feature, ctypes.byref(number))
    print(status == 0, number.value)
"""
    )
    assert lines == ["True 1", "True 0", "False 0"]


def test_results_that_overflow_are_infinities_and_no_other_mode_is_taken() -> None:
    saturation, infinities = 0, 1
    lines = output_of_calls(
        f"""
for mode in ({saturation}, {infinities}):
    print(acl.aclrtSetDeviceSatMode(mode))
acl.aclrtGetDeviceSatMode(ctypes.byref(number))
print(number.value)
"""
    )
    assert lines == ["207000", "0", str(infinities)]


def test_nowhere_to_write_is_an_error() -> None:
    """One of CANN's own examples asks for it."""
    assert output_of_calls("print(acl.aclrtGetRunMode(None))") == ["107000"]


def test_the_default_stream_has_a_handle_which_stays() -> None:
    lines = output_of_calls(
        """
handles = [ctypes.c_void_p(), ctypes.c_void_p()]
for handle in handles:
    assert acl.aclrtCtxGetCurrentDefaultStream(ctypes.byref(handle)) == 0
print(handles[0].value == handles[1].value != 0, acl.aclrtSynchronizeStream(handles[0]))
"""
    )
    assert lines == ["True 0"]


def test_device_memory_is_summed_on_the_way() -> None:
    lines = output_of_calls(
        """
pointer = lambda tensor: ctypes.c_void_p(tensor.data_ptr())
TYPES = {torch.float32: 0, torch.float16: 1, torch.int8: 2, torch.int32: 3, torch.bfloat16: 27}
COMBINE = {10: torch.add, 11: torch.maximum, 12: torch.minimum}
for dtype, number in TYPES.items():
    for kind, combine in COMBINE.items():
        left = torch.tensor([1, -2, 3, 100], dtype=dtype)
        right = torch.tensor([5, -7, 2, 27], dtype=dtype)
        to, source = left.npu(), right.npu()
        torch.npu.synchronize()
        size = ctypes.c_uint64(left.nbytes)
        status = acl.aclrtReduceAsync(pointer(to), pointer(source), size, kind, number, None, None)
        assert status == 0
        acl.aclrtSynchronizeStream(None)
        assert torch.equal(to.cpu(), combine(left, right)), (dtype, kind)
print(acl.aclrtReduceAsync(pointer(to), pointer(source), size, 13, 0, None, None) == 0)
print(acl.aclrtReduceAsync(pointer(to), pointer(source), size, 10, 9, None, None) == 0)
"""
    )
    assert lines == ["False", "False"]


def test_an_allocator_is_found_by_the_stream_that_it_was_registered_with() -> None:
    lines = output_of_calls(
        """
acl.aclrtAllocatorCreateDesc.restype = ctypes.c_void_p
description = ctypes.c_void_p(acl.aclrtAllocatorCreateDesc())
stream = ctypes.c_void_p()
acl.aclrtCreateStream(ctypes.byref(stream))
print(acl.aclrtAllocatorRegister(stream, description) == 0)  # which has no functions
PARTS = ("Obj", "AllocFunc", "FreeFunc", "AllocAdviseFunc", "GetAddrFromBlockFunc")
for at, part in enumerate(PARTS):
    getattr(acl, f"aclrtAllocatorSet{part}ToDesc")(description, ctypes.c_void_p(at + 1))
print(acl.aclrtAllocatorRegister(stream, description) == 0)
found = [ctypes.c_void_p() for _ in range(6)]
ask = lambda: acl.aclrtAllocatorGetByStream(stream, *map(ctypes.byref, found))
print(ask(), found[0].value == description.value, *(each.value for each in found[1:]))
print(acl.aclrtAllocatorUnregister(stream), acl.aclrtAllocatorUnregister(stream), ask() == 0)
print(acl.aclrtAllocatorDestroyDesc(description), acl.aclrtAllocatorDestroyDesc(description) == 0)
"""
    )
    assert lines == ["False", "True", "0 True 1 2 3 4 5", "0 0 False", "0 False"]
