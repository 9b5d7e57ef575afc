"""One layer's recurrent states, in pages that its cache group shares with attention."""

from collections.abc import Sequence
from itertools import accumulate
from math import prod

import torch
import torch_npu


class StatePages:
    """Pages of one layer. A page holds the states one after another, then padding.

    Reads and writes whole pages: their rows are contiguous, a single state's rows are not, and an
    operator on strided rows may copy the whole cache.

    parts: [num_blocks, size] each, nominally fp32: words of 4 bytes. A page is a row of each part,
           one after another.
    """

    def __init__(
        self,
        parts: Sequence[torch.Tensor],
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[torch.dtype],
    ) -> None:
        self.parts = tuple(parts)
        sizes = [prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
        starts = list(accumulate(sizes, initial=0))
        self._places = [
            (slice(start, start + size), tuple(shape), dtype)
            for start, size, shape, dtype in zip(starts, sizes, shapes, dtypes, strict=False)
        ]

    def gather(self, blocks: torch.Tensor) -> torch.Tensor:
        """Copies of pages, [n, page size]. blocks: [n], int32 or int64, on the device"""
        rows = [part.index_select(0, blocks) for part in self.parts]
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)

    def states(self, pages: torch.Tensor) -> list[torch.Tensor]:
        """Each state in copies of pages, a view: [n, *shape] in its own dtype."""
        in_bytes = pages.view(torch.uint8)
        return [
            in_bytes[:, place].view(dtype).unflatten(1, shape)
            for place, shape, dtype in self._places
        ]

    def scatter(self, blocks: torch.Tensor, pages: torch.Tensor) -> None:
        """Writes pages back. Rows of the null block must be equal."""
        indices = blocks.unsqueeze(1)
        sizes = [part.shape[1] for part in self.parts]
        for part, rows in zip(self.parts, pages.split(sizes, dim=1), strict=True):
            torch_npu.npu_scatter_nd_update_(part, indices, rows.contiguous())
