"""Tensors whose memory can be released while their addresses stay: weights and KV cache.

torch's caching allocator gets a pool's memory from the two functions here. Graphs and views hold
addresses, which stay valid.
"""

import ctypes
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch_npu
from torch_npu.npu.memory import MemPool, memory_snapshot, use_mem_pool

from vllm_davinci.core.device.memory import expandable_segments_off
from vllm_davinci.core.device.physical_memory import Segment
from vllm_davinci.core.errors import DeviceError
from vllm_davinci.core.log import init_logger

logger = init_logger(__name__)

WEIGHTS, KV_CACHE = "weights", "kv_cache"

# Signatures of the two functions: void* (ssize_t size, int device, aclrtStream) and void (void*,
# size_t, int device, aclrtStream). Source: torch_npu's NPUPluggableAllocator.h.
_TAKE = ctypes.CFUNCTYPE(
    ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, use_errno=False
)
_GIVE = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p, use_errno=False
)

Range = tuple[int, int]  # first address, and one past the last


@dataclass
class _Taken:
    """One segment of a pool; `kept` is the host's copy of it during sleep."""

    segment: Segment
    tag: str
    kept: dict[Range, torch.Tensor] = field(default_factory=dict)


class SleepingMemory:
    """The memory pools of one process, by tag."""

    def __init__(self) -> None:
        self._taken: dict[int, _Taken] = {}
        self._tag = WEIGHTS
        self._pools: list[MemPool] = []
        # ctypes functions must live as long as torch may call them: forever.
        self._functions = _TAKE(self._take), _GIVE(self._give)
        addresses = [ctypes.cast(each, ctypes.c_void_p).value for each in self._functions]
        self._allocator = torch_npu._C._npu_customAllocator(*addresses)

    @contextmanager
    def pool(self, tag: str) -> Iterator[None]:
        """Allocates tensors made inside in this tag's pool."""
        pool = MemPool(self._allocator)
        self._pools.append(pool)
        before, self._tag = self._tag, tag
        # Expandable segments would come from torch itself, bypassing the pool's functions.
        with expandable_segments_off():
            try:
                with use_mem_pool(pool):
                    yield
            finally:
                self._tag = before
        self._give_back_empty(pool)

    def sleep(self, keep: Sequence[str], dropped: Sequence[Range] = ()) -> None:
        """Releases all memory; copies the contents of the tags `keep` to the host.

        dropped: address ranges in these tags whose contents are not copied
        The caller must have waited for the device.
        """
        torch_npu.npu.synchronize()
        for taken in self._mapped():
            if taken.tag in keep:
                taken.kept = _copies(taken.segment, dropped)
            taken.segment.unmap()
        gc.collect()
        torch_npu.npu.empty_cache()

    def discard(self, tags: Sequence[str]) -> None:
        """Releases the memory of these tags without copying its contents."""
        torch_npu.npu.synchronize()
        for taken in self._mapped():
            if taken.tag in tags:
                taken.segment.unmap()

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocates memory again for these tags, or for all. What was not copied is zero."""
        for taken in self._taken.values():
            if taken.segment.is_mapped or not (tags is None or taken.tag in tags):
                continue
            taken.segment.map()
            taken.segment.zero()
            for (start, end), host in taken.kept.items():
                taken.segment.write(start, host.data_ptr(), end - start)
            taken.kept = {}

    def mapped_bytes(self) -> dict[str, int]:
        """Device memory by tag."""
        found = dict.fromkeys((WEIGHTS, KV_CACHE), 0)
        for taken in self._mapped():
            found[taken.tag] += taken.segment.num_bytes
        return found

    def _mapped(self) -> list[_Taken]:
        return [each for each in self._taken.values() if each.segment.is_mapped]

    def _give_back_empty(self, pool: MemPool) -> None:
        """Unmaps segments that the pool's tensors no longer use."""
        torch_npu.npu.synchronize()
        for found in memory_snapshot(pool.id):
            taken = self._taken.get(found["address"])
            if taken is not None and found["allocated_size"] == 0 and taken.segment.is_mapped:
                del self._taken[found["address"]]
                taken.segment.unmap()

    # --- called by torch, under its allocator's lock -------------------------------------------

    def _take(self, num_bytes: int, device: int, _: Any) -> int | None:
        try:
            segment = Segment(num_bytes, device)
        except DeviceError as error:
            logger.error("%d bytes for %s: %s", num_bytes, self._tag, error)
            return None
        self._taken[segment.address] = _Taken(segment, self._tag)
        return segment.address

    def _give(self, address: int, _: int, device: int, __: Any) -> None:
        taken = self._taken.pop(address, None)
        if taken is None:
            return  # already released
        if taken.segment.is_mapped:
            torch_npu.npu.synchronize(device)
        taken.segment.release()


def _copies(segment: Segment, dropped: Sequence[Range]) -> dict[Range, torch.Tensor]:
    """Host copies of a segment, except the dropped ranges."""
    copies = {}
    start, end = segment.address, segment.address + segment.num_bytes
    for first, after in [*sorted(each for each in dropped if start <= each[0] < end), (end, end)]:
        if first > start:
            host = torch.empty(first - start, dtype=torch.uint8, pin_memory=True)
            segment.read(start, host.data_ptr(), first - start)
            copies[start, first] = host
        start = max(start, after)
    return copies


_memory: SleepingMemory | None = None


def sleeping_memory() -> SleepingMemory:
    """The process's instance, made at the first call; the device must be set."""
    global _memory
    if _memory is None:
        _memory = SleepingMemory()
    return _memory


def range_of(tensor: torch.Tensor) -> Range:
    """The address range of the memory that the tensor views."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
