"""Rows of 8-bit integers with one scale each: an indexer's keys in half the memory.

A Hadamard matrix spreads large entries over a whole row before it is rounded. Products with queries
multiplied by the same matrix change only by a common factor.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch_npu

from vllm_davinci.core.attention.compressed.row_cache import (
    PAGE_ROWS,
    PageParts,
    RowCacheLayer,
    RowKind,
)
from vllm_davinci.core.attention.compressed.step_tokens import StepTokens

# Most elements of the rows that a graph turns into floats at once. One request may exceed it.
ELEMENTS = 2**25


class QuantizedRows(RowCacheLayer):
    """The integers' cache, with a second cache for their scales.

    kind: the rows as floats; `page_rows` None turns graphs off, as in other caches

    Rows are read as fp16, which rounds them less than bf16, or as fp32 in a model of fp32.
    """

    rotation: torch.Tensor  # [width, width]

    def __init__(self, kind: RowKind, prefix: str) -> None:
        pages = None if kind.page_rows is None else 1
        super().__init__(replace(kind, dtype=torch.int8, page_rows=pages), prefix)
        of_scales = replace(kind, width=1, dtype=torch.float16, page_rows=pages)
        self.scales = RowCacheLayer(of_scales, f"{prefix}.scales")
        dtype = torch.float32 if kind.dtype == torch.float32 else torch.float16
        self.register_buffer("rotation", hadamard(kind.width).to(dtype), persistent=False)

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        """x: [.., width]. Returns a tensor of the dtype in which rows are read."""
        return x.to(self.rotation.dtype) @ self.rotation

    def write(self, step: StepTokens, rows: torch.Tensor) -> torch.Tensor:
        """See RowCacheLayer. rows: [n, width], floats, not yet rotated"""
        integers, scales = torch_npu.npu_dynamic_quant(self.rotated(rows))
        self.scales.write(step, scales.unsqueeze(1))
        return super().write(step, integers)

    def of_request(
        self, step: StepTokens, request: int, num_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See RowCacheLayer; returns rotated floats."""
        places, integers = super().of_request(step, request, num_rows)
        return places, self._floats(integers, self.scales.of_request(step, request, num_rows)[1])

    def page_parts(self, step: StepTokens) -> Iterator[PageParts]:
        """See RowCacheLayer. Parts hold rotated copies of the rows, for as many requests as fit
        into memory."""
        requests, device = step.num_requests, step.device
        most = self.rows_of_request
        num_rows = -(-most // PAGE_ROWS) * PAGE_ROWS
        tokens = step.num_tokens // requests
        at_once = max(1, ELEMENTS // (num_rows * self.kind.width))

        def all_of(cache: RowCacheLayer, part: range) -> torch.Tensor:
            def numbers() -> torch.Tensor:
                places = torch.arange(num_rows, device=device).clamp_(max=most - 1)
                own = torch.arange(part.start, part.stop, device=device).unsqueeze(1)
                return cache.numbers(places.expand(len(part), -1), own).flatten()

            return cache.rows.index_select(0, step.shared((cache.key, part), numbers))

        for first in range(0, requests, at_once):
            part = range(first, min(first + at_once, requests))
            floats = self._floats(all_of(self, part), all_of(self.scales, part))
            pages = floats.view(-1, PAGE_ROWS, 1, self.kind.width)
            table = torch.arange(len(pages), dtype=torch.int32, device=device)
            table = table.view(len(part), 1, -1).expand(-1, tokens, -1).flatten(0, 1)
            yield slice(part.start * tokens, part.stop * tokens), pages, table.contiguous()

    def _floats(self, integers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        dtype = self.rotation.dtype
        return integers.to(dtype).mul_(scales.to(dtype))


def hadamard(size: int) -> torch.Tensor:
    """Sylvester's Hadamard matrix, divided by 16: [size, size], fp32.

    size: a power of two. The divisor, exact in any dtype, keeps products of 128 entries in the
    range of fp16.
    """
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / 16
