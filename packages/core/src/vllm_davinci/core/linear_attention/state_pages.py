"""One layer's recurrent states, in pages that its cache group shares with attention."""

from collections.abc import Sequence
from itertools import accumulate
from math import gcd, prod

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
        """Views of each state in copies of pages: [n, *shape], in the state's dtype."""
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


class PackedStatePages(StatePages):
    """Pages in blocks that hold pages of other layers and kinds too (`RowCache`).

    The null block has rows of other kinds, which are no states: it is read as zeros.

    memory:      all bytes of the cache
    first_byte:  of the layer's page in block 0
    block_bytes: from block to block
    """

    def __init__(
        self,
        memory: torch.Tensor,
        first_byte: int,
        block_bytes: int,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[torch.dtype],
    ) -> None:
        unit = gcd(first_byte, block_bytes)  # bytes per row of the view; a page has several
        rows = memory[: memory.numel() // unit * unit].view(torch.float32).view(-1, unit // 4)
        super().__init__((rows,), shapes, dtypes)
        size = self._places[-1][0].stop
        self._per_block = block_bytes // unit
        first = first_byte // unit
        self._within = torch.arange(first, first + -(-size // unit), device=memory.device)

    def gather(self, blocks: torch.Tensor) -> torch.Tensor:
        pages = self.parts[0].index_select(0, self._rows_of(blocks)).view(len(blocks), -1)
        return pages.masked_fill_(blocks.eq(0).unsqueeze(1), 0)

    def scatter(self, blocks: torch.Tensor, pages: torch.Tensor) -> None:
        rows = pages.view(-1, self.parts[0].shape[1])
        torch_npu.npu_scatter_nd_update_(self.parts[0], self._rows_of(blocks).unsqueeze(1), rows)

    def _rows_of(self, blocks: torch.Tensor) -> torch.Tensor:
        return (blocks.long().unsqueeze(1) * self._per_block + self._within).flatten()
