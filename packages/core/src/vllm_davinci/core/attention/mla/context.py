"""Cached context of prefills, expanded and attended to in chunks of bounded size."""

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

# Rows of cached context expanded to keys and values at once. Per head and row that is qk_nope +
# qk_rope + v = 320 elements: 84 MB in bf16 for 16 heads.
CONTEXT_CHUNK_ROWS = 8192


class ContextPart(NamedTuple):
    """Tokens `start` to `start + length` of a request; `start` is a multiple of the block size."""

    request: int
    start: int
    length: int


@dataclass
class ContextChunk:
    """Consecutive prefill requests, with a part of the cached context of each.
    ~
    """

    query_rows: slice
    actual_seq_lengths_q: list[int]
    actual_seq_lengths_kv: list[int]
    block_table: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor
    _query_row: torch.Tensor | None = None

    @property
    def num_gathered(self) -> int:
        """Number of rows to gather from the cache."""
        return self.actual_seq_lengths_kv[-1]

    def of_rows(self, values: torch.Tensor | None) -> torch.Tensor | None:
        """Repeats each request's value for its cached rows.

        values: [rows of all prefills, ...], equal for all rows of a request
        Returns [num_rows, ...]; None if `values` is None.
        """
        if values is None:
            return None
        if self._query_row is None:
            first = [self.query_rows.start + end for end in (0, *self.actual_seq_lengths_q[:-1])]
            lengths = np.diff(self.actual_seq_lengths_kv, prepend=0)
            self._query_row = async_tensor_h2d(np.repeat(first, lengths), device=values.device)
        return values.index_select(0, self._query_row)


def plan_context(
    context_lens: list[int], max_rows: int, block_size: int
) -> list[list[ContextPart]]:
    """Plans chunks of at most `max_rows` tokens that together cover every context once, in order.

    Each chunk holds at least one part, each request at most once, and no request without context.
    A part begins at a block boundary. Raises ValueError if a chunk cannot hold a block.
    """
    if max_rows < block_size:
        raise ValueError(f"A chunk of {max_rows} rows cannot hold a block of {block_size}.")
    chunks: list[list[ContextPart]] = []
    chunk: list[ContextPart] = []
    room = max_rows
    for request, context_len in enumerate(context_lens):
        start = 0
        if not context_len and chunk:
            chunks.append(chunk)
            chunk, room = [], max_rows
        while start < context_len:
            rest = context_len - start
            length = rest if rest <= room else room // block_size * block_size
            if length:
                chunk.append(ContextPart(request, start, length))
                start += length
                room -= length
            if start < context_len:
                chunks.append(chunk)
                chunk, room = [], max_rows
    if chunk:
        chunks.append(chunk)
    return chunks


def context_chunk(
    parts: list[ContextPart], query_lens: list[int], block_table: torch.Tensor
) -> ContextChunk:
    """Builds the chunk of these parts. query_lens, block_table: of all prefill requests."""
    first, after = parts[0].request, parts[-1].request + 1
    ranges = async_tensor_h2d(
        [[part.length for part in parts], [part.start for part in parts]],
        block_table.device,
        torch.int32,
    )
    start = sum(query_lens[:first])
    actual_seq_lengths_q = list(accumulate(query_lens[first:after]))
    return ContextChunk(
        query_rows=slice(start, start + actual_seq_lengths_q[-1]),
        actual_seq_lengths_q=actual_seq_lengths_q,
        actual_seq_lengths_kv=list(accumulate(part.length for part in parts)),
        block_table=block_table[first:after],
        lengths=ranges[0],
        starts=ranges[1],
    )
