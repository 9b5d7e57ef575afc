"""Requests over a paged cache, and their attention in plain torch."""

from collections.abc import Sequence
from typing import Any

import torch

from vllm_davinci.core.attention.metadata import NPUAttentionMetadata
from vllm_davinci.core.attention.paged import NPUAttentionImpl
from vllm_davinci.core.attention.paged_cache import PagedCache

BLOCK_SIZE = 128


def reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    is_visible: torch.Tensor,
    sinks: torch.Tensor | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Sequence[float] | None = None,
) -> torch.Tensor:
    """query [q, heads, d], keys and values [k, kv_heads, d], is_visible [q, k] -> [q, heads, d]

    sinks: [heads], a score in each softmax, without a value
    """
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys.double()) * scale
    if soft_cap is not None:
        scores = soft_cap * (scores / soft_cap).tanh()
    if alibi_slopes is not None:
        slopes = torch.tensor(alibi_slopes, dtype=torch.float64)
        scores = scores + slopes[:, None, None] * torch.arange(len(keys))
    scores.masked_fill_(~is_visible, float("-inf"))
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(-1, len(query), 1)
        scores = torch.cat([scores, column], -1)
        values = torch.cat([values, torch.zeros_like(values[:1])])
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values.double()).to(query.dtype)


def visible(num_queries: int, num_keys: int, window: int | None) -> torch.Tensor:
    """Returns the keys visible to each query if the last query is the last key."""
    distance = torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


class Batch:
    """Requests with cached and new tokens, in shuffled blocks."""

    def __init__(self, lengths, num_heads, num_kv_heads, head_size, dtype, device):
        generator = torch.Generator().manual_seed(0)
        self.lengths = lengths
        blocks_each = [-(-(context + new) // BLOCK_SIZE) for context, new in lengths]
        num_blocks = sum(blocks_each) + 1
        ids = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
        table = torch.zeros(len(lengths), max(blocks_each), dtype=torch.int32)
        shape = (num_blocks, BLOCK_SIZE, num_kv_heads, head_size)
        key_cache, value_cache = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
        self.query, self.key, self.value, slots = [], [], [], []
        for row, ((context, new), count) in enumerate(zip(lengths, blocks_each, strict=True)):
            own = [ids.pop() for _ in range(count)]
            table[row, :count] = torch.tensor(own)
            slot = torch.tensor([own[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
                                 for p in range(context + new)])  # fmt: skip
            random = [
                torch.randn(context + new, heads, head_size, generator=generator).to(dtype)
                for heads in (num_heads, num_kv_heads, num_kv_heads)
            ]
            self.query.append(random[0][context:])
            self.key.append(random[1])
            self.value.append(random[2])
            key_cache.flatten(0, 1)[slot[:context]] = random[1][:context]
            value_cache.flatten(0, 1)[slot[:context]] = random[2][:context]
            slots.append(slot[context:])
        self.cache = PagedCache.of(key_cache.to(device), value_cache.to(device))
        query_lens = torch.tensor([new for _, new in lengths])
        self.metadata = NPUAttentionMetadata(
            num_actual_tokens=int(query_lens.sum()),
            actual_seq_lengths_q=query_lens.cumsum(0).tolist(),
            seq_lens=[context + new for context, new in lengths],
            block_table=table.to(device),
            slot_mapping=torch.cat(slots).to(device),
        )
        self.device = device

    def new_rows(self, rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(
            [row[context:] for row, (context, _) in zip(rows, self.lengths, strict=True)]
        )

    def run(self, attention: NPUAttentionImpl, num_padding_rows: int = 0) -> torch.Tensor:
        new = [torch.cat(self.query), self.new_rows(self.key), self.new_rows(self.value)]
        new = [
            torch.cat([rows, rows.new_full((num_padding_rows, *rows.shape[1:]), 9.0)]).to(
                self.device
            )
            for rows in new
        ]
        query, key, value = new
        # Rows are slices of a fused projection's output.
        together = torch.cat((key, value), 1)
        key, value = together.split((key.shape[1], value.shape[1]), 1)
        output = torch.full_like(query, 7.0)
        returned = attention.forward(None, query, key, value, self.cache, self.metadata, output)
        assert returned is output
        return output.cpu()

    def expected(
        self,
        scale: float,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
        **of_scores: Any,
    ) -> torch.Tensor:
        """of_scores: soft_cap or alibi_slopes of `reference`"""
        return torch.cat(
            [
                reference(q, k, v, scale, visible(len(q), len(k), window), sinks, **of_scores)
                for q, k, v in zip(self.query, self.key, self.value, strict=True)
            ]
        )


DECODES = [(5, 1), (127, 1), (128, 1), (300, 1)]
PREFILLS = [(0, 3), (0, 200), (0, 1)]
MIXED = [(40, 1), (0, 150), (130, 20), (255, 1)]
