"""Device memory in two parts: a reserved address range and the memory mapped into it."""

import ctypes
from ctypes import byref, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache

from vllm_davinci.core.errors import DeviceError

# Page size of ACL_HBM_MEM_HUGE, to which allocations are rounded up.
GRANULARITY_BYTES = 2 << 20
_HANDLE_TYPE_NONE, _PINNED, _HBM_HUGE, _ON_DEVICE = 0, 0, 4, 1
_HUGE_PAGES = 1  # aclrtReserveMemAddress, flags
_HOST_TO_DEVICE, _DEVICE_TO_HOST = 1, 2


class _Location(ctypes.Structure):
    """aclrtMemLocation"""

    _fields_ = (("id", c_uint32), ("type", c_int))


class _Properties(ctypes.Structure):
    """aclrtPhysicalMemProp. Source: acl_rt.h of CANN."""

    _fields_ = (
        ("handle_type", c_int),
        ("allocation_type", c_int),
        ("attribute", c_int),
        ("location", _Location),
        ("reserve", c_uint64),
    )


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libascendcl.so")  # already loaded by torch_npu


def _call(function: str, *arguments: object) -> None:
    status = getattr(_library(), function)(*arguments)
    if status != 0:
        raise DeviceError(f"{function} failed with ACL error {status}; plog has more.")


class Segment:
    """An address range of one device, mapped when it is made.

    address:   first address; constant until `release`
    num_bytes: a multiple of GRANULARITY_BYTES
    Raises DeviceError if the device has no memory or address range left.
    """

    def __init__(self, num_bytes: int, device: int) -> None:
        self.num_bytes = -(-num_bytes // GRANULARITY_BYTES) * GRANULARITY_BYTES
        self._device = device
        self._handle: c_void_p | None = None
        start = c_void_p()
        _call(
            "aclrtReserveMemAddress",
            byref(start),
            c_size_t(self.num_bytes),
            c_size_t(0),
            None,
            c_uint64(_HUGE_PAGES),
        )
        assert start.value is not None
        self.address: int = start.value
        try:
            self.map()
        except DeviceError:
            _call("aclrtReleaseMemAddress", c_void_p(self.address))
            raise

    @property
    def is_mapped(self) -> bool:
        return self._handle is not None

    def map(self) -> None:
        """Maps device memory, with undefined contents."""
        handle = c_void_p()
        location = _Location(self._device, _ON_DEVICE)
        wanted = _Properties(_HANDLE_TYPE_NONE, _PINNED, _HBM_HUGE, location, 0)
        size = c_size_t(self.num_bytes)
        _call("aclrtMallocPhysical", byref(handle), size, byref(wanted), c_uint64(0))
        start = c_void_p(self.address)
        try:
            _call("aclrtMapMem", start, size, c_size_t(0), handle, c_uint64(0))
        except DeviceError:
            _call("aclrtFreePhysical", handle)
            raise
        self._handle = handle

    def unmap(self) -> None:
        """Returns the memory to the device. The caller must have waited for all its users."""
        _call("aclrtUnmapMem", c_void_p(self.address))
        _call("aclrtFreePhysical", self._handle)
        self._handle = None

    def release(self) -> None:
        """Releases the address range too."""
        if self.is_mapped:
            self.unmap()
        _call("aclrtReleaseMemAddress", c_void_p(self.address))

    def read(self, start: int, host_address: int, num_bytes: int) -> None:
        """Copies from the device's address `start`, and waits."""
        _copy(host_address, start, num_bytes, _DEVICE_TO_HOST)

    def write(self, start: int, host_address: int, num_bytes: int) -> None:
        """Copies to the device's address `start`, and waits."""
        _copy(start, host_address, num_bytes, _HOST_TO_DEVICE)

    def zero(self) -> None:
        size = c_size_t(self.num_bytes)
        _call("aclrtMemset", c_void_p(self.address), size, c_int(0), size)


def _copy(to: int, source: int, num_bytes: int, kind: int) -> None:
    size = c_size_t(num_bytes)
    _call("aclrtMemcpy", c_void_p(to), size, c_void_p(source), size, c_int(kind))
