"""Sparse attention of DeepSeek-V3.2: the indexer, and attention over the tokens it selects.

Source: DeepSeek-V3.2-Exp technical report, section 2.1.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Generator, Tensor

from vllm_davinci.operators.attention import attend, rows_of
from vllm_davinci.operators.calls.call import OperatorCall, npu
from vllm_davinci.operators.calls.operands import (
    BLOCK_SIZE,
    CAUSAL,
    blocks_of,
    ends_of,
    normal,
    zeros,
)
from vllm_davinci.operators.calls.sizes import LatentSizes, ModelSizes

QUERIES, LENGTHS = [1, 40, 3], [300, 200, 3]
TOKENS = sum(QUERIES)
# Per query: its request, and its number of visible tokens.
SEEN = [
    (request, seen)
    for request, (new, length) in enumerate(zip(QUERIES, LENGTHS, strict=True))
    for seen in range(length - new + 1, length + 1)
]
SPARSE_COUNT = 2048
INDEX_SIZE = 128
ABSORBED = 2


def calls(model: ModelSizes) -> Iterator[OperatorCall]:
    if model.latent is None or not model.index_heads:
        return
    yield _writes_keys()
    yield _indexer(model)
    yield _attention(model, model.latent)


def _of_requests() -> dict[str, Tensor]:
    return {
        "table": blocks_of(LENGTHS),
        "ends": torch.tensor(ends_of(QUERIES), dtype=torch.int32),
        "lengths": torch.tensor(LENGTHS, dtype=torch.int32),
    }


def _writes_keys() -> OperatorCall:
    """Writes rows of the indexer's cache."""

    def call(cache: Tensor, slots: Tensor, key: Tensor) -> Tensor:
        npu.npu_scatter_nd_update_(cache, slots, key)
        return cache

    def defined(cache: Tensor, slots: Tensor, key: Tensor) -> Tensor:
        cache[slots[:, 0]] = key
        return cache

    return OperatorCall(
        "npu_scatter_nd_update_", "ScatterNdUpdate", "bfloat16",
        {
            "cache": zeros(512, INDEX_SIZE),
            "slots": lambda generator: torch.randperm(512, generator=generator)[:TOKENS, None],
            "key": normal(TOKENS, INDEX_SIZE),
        },
        call, defined, exact=True,
    )  # fmt: skip


def _indexer(model: ModelSizes) -> OperatorCall:
    """Selects all visible tokens, in any order, if they are fewer than the indexer may select."""
    blocks = blocks_of(LENGTHS).numel(), BLOCK_SIZE, 1

    def call(
        query: Tensor, key: Tensor, weights: Tensor, table: Tensor, ends: Tensor, lengths: Tensor
    ) -> Any:
        indices, _ = npu.npu_lightning_indexer(
            query, key, weights, actual_seq_lengths_query=ends, actual_seq_lengths_key=lengths,
            block_table=table, layout_query="TND", layout_key="PA_BSND",
            sparse_count=SPARSE_COUNT, sparse_mode=CAUSAL,
        )  # fmt: skip
        return indices.sort(-1)[0]

    def defined(**_: Tensor) -> Tensor:
        out = torch.full((TOKENS, 1, SPARSE_COUNT), -1, dtype=torch.int32)
        for row, (_request, seen) in enumerate(SEEN):
            out[row, 0, SPARSE_COUNT - seen :] = torch.arange(seen)
        return out

    return OperatorCall(
        "npu_lightning_indexer", "LightningIndexer", "bfloat16",
        {
            "query": normal(TOKENS, model.index_heads, INDEX_SIZE),
            "key": normal(*blocks, INDEX_SIZE),
            "weights": normal(TOKENS, model.index_heads),
            **_of_requests(),
        },
        call, defined, exact=True,
    )  # fmt: skip


def _attention(model: ModelSizes, latent: LatentSizes) -> OperatorCall:
    heads, scale = model.heads, (latent.nope + latent.rope) ** -0.5
    blocks = blocks_of(LENGTHS).numel(), BLOCK_SIZE, 1

    def chosen(generator: Generator) -> Tensor:
        indices = torch.full((TOKENS, 1, SPARSE_COUNT), -1, dtype=torch.int32)
        for row, (_, seen) in enumerate(SEEN):
            some = torch.randperm(seen, generator=generator)[: max(1, seen // 2)]
            indices[row, 0, : len(some)] = some.int()
        return indices

    def call(query: Tensor, rows: Tensor, indices: Tensor, table: Tensor, **more: Tensor) -> Any:
        out = npu.npu_sparse_flash_attention(
            query, rows, rows, indices, scale, block_table=table,
            actual_seq_lengths_query=more["ends"], actual_seq_lengths_kv=more["lengths"],
            query_rope=more["query_rope"], key_rope=more["key_rope"], layout_query="TND",
            layout_kv="PA_BSND", sparse_mode=CAUSAL, attention_mode=ABSORBED,
        )  # fmt: skip
        return out if isinstance(out, Tensor) else out[0]

    def defined(
        query: Tensor, rows: Tensor, indices: Tensor, table: Tensor, **more: Tensor
    ) -> Tensor:
        queries, outs = torch.cat([query, more["query_rope"]], -1), []
        whole = torch.cat([rows, more["key_rope"]], -1)
        for own, own_indices, (request, seen) in zip(queries, indices, SEEN, strict=True):
            some = own_indices[0][own_indices[0] >= 0].long()
            keys = rows_of(whole, table[request], seen)[some]
            outs.append(attend(own[None], keys, keys[..., : latent.rank], scale)[0])
        return torch.cat(outs).to(query.dtype)

    return OperatorCall(
        "npu_sparse_flash_attention", "SparseFlashAttention", "bfloat16",
        {
            "query": normal(TOKENS, heads, latent.rank),
            "rows": normal(*blocks, latent.rank, scale=0.3),
            "query_rope": normal(TOKENS, heads, latent.rope),
            "key_rope": normal(*blocks, latent.rope),
            "indices": chosen,
            **_of_requests(),
        },
        call, defined,
    )  # fmt: skip
