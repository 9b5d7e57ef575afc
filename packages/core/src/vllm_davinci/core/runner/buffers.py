"""Request tables that are written on the host and read on the device.

vLLM's tables are read from host memory by the device (UVA), which an NPU cannot do, or copied whole
in every step. Ours copy changes only, from pinned memory that torch holds until the copy is done.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.utils import platform_utils
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor, UvaBackedTensor

V2_MODULES = "vllm.v1.worker.gpu."


class CopiedTensor(UvaBackedTensor):
    """A table whose rows the host writes. Its device tensor keeps its address.

    np:  written by the host
    gpu: content as of the last `copy_to_uva`
    """

    pool: Any  # vLLM's buffers, now unused
    _copied: bytes | None

    @classmethod
    def take_over(cls, table: UvaBackedTensor) -> None:
        """Converts vLLM's table to this class, in place."""
        table.__class__ = cls
        assert isinstance(table, cls)
        del table.pool
        table._copied = None
        table.copy_to_uva()

    def copy_to_uva(self, n: int | None = None) -> torch.Tensor:
        """Copies the table if it has changed since the last call. Returns the first n rows."""
        now = self.np.tobytes()  # comparing arrays takes several times as long
        if now != self._copied:
            self._copied = now
            async_tensor_h2d(self.np.copy(), out=self.gpu)
        return self.gpu if n is None else self.gpu[:n]


class IndexedWrites(StagedWriteTensor):
    """A device table into which the host writes runs of elements at the beginning of a step."""

    @classmethod
    def take_over(cls, table: StagedWriteTensor) -> None:
        """Converts vLLM's table to this class, in place."""
        table.__class__ = cls
        for pool in ("write_indices", "write_starts", "write_cu_lens", "write_contents"):
            vars(table).pop(pool, None)

    def apply_write(self) -> None:
        """Writes all staged runs, which must not overlap."""
        if not self._staged_write_indices:
            return
        rows, starts, ends = (
            np.asarray(each, dtype=np.int64)
            for each in (
                self._staged_write_indices,
                self._staged_write_starts,
                self._staged_write_cu_lens,
            )
        )
        elements = self.gpu.view(-1)
        first = rows * self.gpu.stride(0) + starts
        if len(rows) == 1:
            run = elements[first[0] : first[0] + ends[0]]
            async_tensor_h2d(self._staged_write_contents, dtype=self.dtype, out=run)
        else:
            lengths = np.diff(ends, prepend=0)
            places = np.arange(ends[-1]) + np.repeat(first - (ends - lengths), lengths)
            contents = async_tensor_h2d(self._staged_write_contents, self.device, self.dtype)
            elements.index_copy_(0, async_tensor_h2d(places, self.device), contents)
        self.clear_staged_writes()


def take_over_tables(*holders: Any) -> None:
    """Converts every table of these objects of vLLM's runner, and of objects they hold."""
    seen: set[int] = set()
    for holder in holders:
        for table in _tables(holder, seen):
            if isinstance(table, UvaBackedTensor) and not isinstance(table, CopiedTensor):
                CopiedTensor.take_over(table)
            elif isinstance(table, StagedWriteTensor) and not isinstance(table, IndexedWrites):
                IndexedWrites.take_over(table)


def _tables(holder: Any, seen: set[int]) -> Iterator[UvaBackedTensor | StagedWriteTensor]:
    if id(holder) in seen:
        return
    seen.add(id(holder))
    if isinstance(holder, UvaBackedTensor | StagedWriteTensor):
        yield holder
    elif isinstance(holder, list | tuple):
        for each in holder:
            yield from _tables(each, seen)
    elif any(each.__module__.startswith(V2_MODULES) for each in type(holder).__mro__):
        for each in list(vars(holder).values()):
            yield from _tables(each, seen)


def leave_out_uva() -> None:
    """Makes vLLM believe that the device cannot read host memory (UVA).

    vLLM assumes that all pinned memory is readable, and caches each answer. Idempotent.
    """
    answers = platform_utils.is_pin_memory_available, platform_utils.is_uva_available
    for answer in answers:
        answer.cache_clear()
    platform = type(current_platform)
    platform.has_pinned_memory = False
    try:
        assert not platform_utils.is_uva_available()
    finally:
        platform.has_pinned_memory = True
        platform_utils.is_pin_memory_available.cache_clear()
