"""Tables of requests that are written on the host and read on the device.

vLLM's read the host's memory from the device (UVA), which an NPU does not, or copy it as a whole in
every step. Ours copy what has changed, from pinned memory that torch keeps until the copy is done.
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
    """A table whose rows the host writes. Its tensor on the device stays where it is.

    np:  what the host writes
    gpu: as of the last `copy_to_uva`
    """

    pool: Any  # vLLM's buffers, which are given up
    _copied: np.ndarray | None

    @classmethod
    def take_over(cls, table: UvaBackedTensor) -> None:
        """Makes vLLM's table one of these, in its place."""
        table.__class__ = cls
        assert isinstance(table, cls)
        del table.pool
        table._copied = None
        table.copy_to_uva()

    def copy_to_uva(self, n: int | None = None) -> torch.Tensor:
        """Copies what has changed since the last time, all or nothing. Returns the first n rows."""
        if self._copied is None or not np.array_equal(self._copied, self.np):
            self._copied = self.np.copy()
            async_tensor_h2d(self._copied, out=self.gpu)
        return self.gpu if n is None else self.gpu[:n]


class IndexedWrites(StagedWriteTensor):
    """A table on the device that gets runs of elements from the host, at the begin of a step."""

    @classmethod
    def take_over(cls, table: StagedWriteTensor) -> None:
        """Makes vLLM's table one of these, in its place."""
        table.__class__ = cls
        for pool in ("write_indices", "write_starts", "write_cu_lens", "write_contents"):
            vars(table).pop(pool, None)

    def apply_write(self) -> None:
        """Writes all runs that are staged. No element is in two of them."""
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
    """Takes over every table of these objects of vLLM's runner, and of the objects they hold."""
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
    """Makes vLLM's answer "no" where it asks whether the device reads the host's memory.

    vLLM takes all pinned memory for readable, and keeps the answer of each question. Idempotent.
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
