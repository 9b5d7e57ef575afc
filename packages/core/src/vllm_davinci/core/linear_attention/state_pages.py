"""The states of one layer's requests, in the pages that its cache group shares with attention."""

from collections.abc import Sequence
from itertools import accumulate
from math import prod

import torch
import torch_npu


class StatePages:
    """Pages of one layer. A page holds the states one after the other, then padding.

    Whole pages are read and written: their rows are contiguous, where those of one state would not
    be, and an operator on rows that are not may copy all of the cache.

    memory: [num_blocks, page size], fp32 in name alone: words of 4 bytes
    """

    def __init__(
        self, memory: torch.Tensor, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]
    ) -> None:
        self.memory = memory
        sizes = [prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
        starts = list(accumulate(sizes, initial=0))
        self._places = [
            (slice(start, start + size), tuple(shape), dtype)
            for start, size, shape, dtype in zip(starts, sizes, shapes, dtypes, strict=False)
        ]

    def gather(self, blocks: torch.Tensor) -> torch.Tensor:
        """Copies of pages, [n, page size]. blocks: [n], int32 or int64, on the device"""
        return self.memory.index_select(0, blocks)

    def states(self, pages: torch.Tensor) -> list[torch.Tensor]:
        """Each state in copies of pages, a view: [n, *shape] in its own dtype."""
        in_bytes = pages.view(torch.uint8)
        return [
            in_bytes[:, place].view(dtype).unflatten(1, shape)
            for place, shape, dtype in self._places
        ]

    def scatter(self, blocks: torch.Tensor, pages: torch.Tensor) -> None:
        """Writes pages back. Rows of the null block must be equal."""
        torch_npu.npu_scatter_nd_update_(self.memory, blocks.unsqueeze(1), pages)
