"""Pinned host memory for offloaded blocks, divided so that little of it is wasted.

The allocator of pinned memory rounds every allocation up to a power of two, so memory is allocated
in slabs whose sizes are powers of two, each filled with chunks.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_davinci.core.errors import ConfigurationError

LARGEST_SLAB_BYTES = 1 << 30


def slab_chunks(budget_bytes: int, chunk_bytes: int) -> list[int]:
    """Number of chunks in each slab that the budget allows, rounding included.

    Largest first: slabs of LARGEST_SLAB_BYTES (or of one chunk, if larger), then the remaining
    powers of two.
    """
    largest = max(LARGEST_SLAB_BYTES, 1 << (chunk_bytes - 1).bit_length())
    chunks: list[int] = []
    while budget_bytes >= chunk_bytes:
        size = min(largest, 1 << (budget_bytes.bit_length() - 1))
        if size < chunk_bytes:
            break
        chunks.append(size // chunk_bytes)
        budget_bytes -= size
    return chunks


class Run(NamedTuple):
    """Consecutive device blocks that map to consecutive rows of one slab."""

    slab: int
    row: int
    block: int
    length: int


class HostRows:
    """Rows of pinned memory: one per block and region of the KV cache.

    row_bytes:        of each region
    slabs:            chunks of each slab
    blocks_per_chunk: rows of a chunk
    """

    def __init__(
        self, row_bytes: Sequence[int], slabs: Sequence[int], blocks_per_chunk: int
    ) -> None:
        rows = [chunks * blocks_per_chunk for chunks in slabs]
        # First row of each slab, and the end of the last.
        self._starts = np.cumsum([0, *rows])
        self.parts: list[list[torch.Tensor]] = []
        """By slab, then by region: int8 [rows, row_bytes], contiguous."""
        for count in rows:
            sizes = [count * size for size in row_bytes]
            memory = _pinned(sum(sizes))
            self.parts.append(
                [part.view(count, -1) for part in memory.split(sizes)]  # rows of each region
            )

    def runs(self, blocks: NDArray[np.int64], rows: NDArray[np.int64]) -> Iterator[Run]:
        """Groups pairs of block and row into runs that are consecutive within a slab."""
        if not len(blocks):
            return
        slabs = np.searchsorted(self._starts, rows, side="right") - 1
        breaks = (np.diff(blocks) != 1) | (np.diff(rows) != 1) | (np.diff(slabs) != 0)
        starts = np.concatenate([[0], np.flatnonzero(breaks) + 1])
        ends = np.concatenate([starts[1:], [len(blocks)]])
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            slab = int(slabs[start])
            row = int(rows[start] - self._starts[slab])
            yield Run(slab, row, int(blocks[start]), end - start)


def _pinned(size_bytes: int) -> torch.Tensor:
    try:
        return torch.zeros(size_bytes, dtype=torch.int8, pin_memory=True)
    except RuntimeError as error:
        raise ConfigurationError(
            f"--kv-offloading-size, divided among the ranks, needs {size_bytes / 2**30:.2f} GiB of"
            " pinned memory, which the host does not have. Give a smaller size."
        ) from error
