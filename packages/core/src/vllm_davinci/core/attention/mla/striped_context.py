"""Cached context of prefills, divided among ranks."""

from dataclasses import dataclass

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_davinci.core.attention.mla.context import ContextChunk, ContextPart, context_chunk
from vllm_davinci.core.attention.stripes import Stripes


@dataclass
class StripedChunk(ContextChunk):
    """A chunk whose `lengths` and `starts` count this rank's rows.

    num_sent: rows that each rank sends to the others: its own, then padding
    order:    [num_rows], int64, on the device: index of each context row, in token order, among the
              rows that all ranks have sent
    """

    num_sent: int = 0
    order: torch.Tensor | None = None

    @property
    def num_gathered(self) -> int:
        return self.num_sent


def striped_chunk(
    parts: list[ContextPart],
    query_lens: list[int],
    block_table: torch.Tensor,
    stripes: Stripes,
) -> StripedChunk:
    """Builds the chunk of these parts. query_lens, block_table: of all prefill requests."""
    begins = np.array([part.start for part in parts])
    ends = begins + [part.length for part in parts]
    # [size, parts]: rows before each part begins, and rows in it, by rank
    before = np.stack([stripes.length(begins, rank) for rank in range(stripes.size)])
    kept = np.stack([stripes.length(ends, rank) for rank in range(stripes.size)]) - before
    num_sent = int(kept.sum(1).max())
    first = np.cumsum(kept, 1) - kept + num_sent * np.arange(stripes.size)[:, None] - before
    order = []
    for number, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        positions = np.arange(begin, end)
        order.append(first[stripes.owners(positions), number] + stripes.places(positions))
    own_ranges = zip(before[stripes.rank].tolist(), kept[stripes.rank].tolist(), strict=True)
    own = [
        ContextPart(part.request, *own_range)
        for part, own_range in zip(parts, own_ranges, strict=True)
    ]
    chunk = context_chunk(own, query_lens, block_table)
    return StripedChunk(
        query_rows=chunk.query_rows,
        actual_seq_lengths_q=chunk.actual_seq_lengths_q,
        actual_seq_lengths_kv=np.cumsum([part.length for part in parts]).tolist(),
        block_table=chunk.block_table,
        lengths=chunk.lengths,
        starts=chunk.starts,
        num_sent=num_sent,
        order=async_tensor_h2d(np.concatenate(order), device=block_table.device),
    )
