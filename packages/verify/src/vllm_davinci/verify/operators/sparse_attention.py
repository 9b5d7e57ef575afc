"""Sparse attention of DeepSeek-V3.2: the indexer's choice, and attention over the chosen tokens.

Source: DeepSeek-V3.2-Exp technical report, section 2.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Generator, Tensor

from vllm_davinci.verify.operators.attention import CAUSAL, rows_of
from vllm_davinci.verify.operators.call import OperatorCall
from vllm_davinci.verify.operators.operands import BLOCK_SIZE, blocks_of, ends_of, normal
from vllm_davinci.verify.operators.shapes import LatentSizes, ModelSizes

QUERIES, LENGTHS = [1, 40, 3], [300, 200, 3]
SPARSE_COUNT = 2048
INDEX_SIZE = 128
ABSORBED = 2


def calls(model: ModelSizes) -> Iterator[OperatorCall]:
    if model.latent is None or not model.index_heads:
        return
    yield _writes_keys()
    yield _indexer(model)
    yield _attention(model, model.latent)


def chosen(
    query: Tensor, key: Tensor, weights: Tensor, table: Tensor
) -> list[tuple[int, int, Tensor]]:
    """For each query: its request, how many tokens it sees, and their scores."""
    found, row = [], 0
    for request, (new, length) in enumerate(zip(QUERIES, LENGTHS, strict=True)):
        keys = rows_of(key, table[request], length).squeeze(1).double()
        for seen in range(length - new + 1, length + 1):
            scores = torch.relu(query[row].double() @ keys[:seen].T)
            found.append((request, seen, (scores * weights[row].double()[:, None]).sum(0)))
            row += 1
    return found


def _writes_keys() -> OperatorCall:
    """Rows of the indexer's cache."""
    import torch_npu

    def make(generator: Generator) -> dict[str, Any]:
        slots = torch.randperm(512, generator=generator)[: sum(QUERIES)]
        return {
            "cache": torch.zeros(512, INDEX_SIZE, dtype=torch.bfloat16),
            "slots": slots.unsqueeze(1),
            "key": normal(generator, sum(QUERIES), INDEX_SIZE),
        }

    def call(cache: Tensor, slots: Tensor, key: Tensor) -> Tensor:
        torch_npu.npu_scatter_nd_update_(cache, slots, key)
        return cache

    def defined(cache: Tensor, slots: Tensor, key: Tensor) -> Tensor:
        cache[slots[:, 0]] = key
        return cache

    return OperatorCall(
        "npu_scatter_nd_update_", "ScatterNdUpdate", "bfloat16", make, call, defined, exact=True
    )


def _indexer(model: ModelSizes) -> OperatorCall:
    """Fewer tokens than are chosen at most: every one that a query sees, in any order."""
    import torch_npu

    def make(generator: Generator) -> dict[str, Any]:
        table, blocks = blocks_of(generator, LENGTHS)
        return {
            "query": normal(generator, sum(QUERIES), model.index_heads, INDEX_SIZE),
            "key": normal(generator, blocks, BLOCK_SIZE, 1, INDEX_SIZE),
            "weights": normal(generator, sum(QUERIES), model.index_heads),
            "table": table,
            "ends": torch.tensor(ends_of(QUERIES), dtype=torch.int32),
            "lengths": torch.tensor(LENGTHS, dtype=torch.int32),
        }

    def call(
        query: Tensor, key: Tensor, weights: Tensor, table: Tensor, ends: Tensor, lengths: Tensor
    ) -> Tensor:
        indices, _ = torch_npu.npu_lightning_indexer(
            query, key, weights, actual_seq_lengths_query=ends, actual_seq_lengths_key=lengths,
            block_table=table, layout_query="TND", layout_key="PA_BSND",
            sparse_count=SPARSE_COUNT, sparse_mode=CAUSAL,
        )  # fmt: skip
        return indices.sort(-1)[0]

    def defined(
        query: Tensor, key: Tensor, weights: Tensor, table: Tensor, ends: Tensor, lengths: Tensor
    ) -> Tensor:
        out = torch.full((sum(QUERIES), 1, SPARSE_COUNT), -1, dtype=torch.int32)
        for row, (_, seen, _) in enumerate(chosen(query, key, weights, table)):
            out[row, 0, SPARSE_COUNT - seen :] = torch.arange(seen)
        return out

    return OperatorCall(
        "npu_lightning_indexer", "LightningIndexer", "bfloat16", make, call, defined, exact=True
    )


def _attention(model: ModelSizes, latent: LatentSizes) -> OperatorCall:
    import torch_npu

    tokens, heads, scale = sum(QUERIES), model.heads, (latent.nope + latent.rope) ** -0.5

    def make(generator: Generator) -> dict[str, Any]:
        table, blocks = blocks_of(generator, LENGTHS)
        indices = torch.full((tokens, 1, SPARSE_COUNT), -1, dtype=torch.int32)
        row = 0
        for new, length in zip(QUERIES, LENGTHS, strict=True):
            for seen in range(length - new + 1, length + 1):
                some = torch.randperm(seen, generator=generator)[: max(1, seen // 2)]
                indices[row, 0, : len(some)] = some.int()
                row += 1
        return {
            "query": normal(generator, tokens, heads, latent.rank),
            "rows": normal(generator, blocks, BLOCK_SIZE, 1, latent.rank, scale=0.3),
            "query_rope": normal(generator, tokens, heads, latent.rope),
            "key_rope": normal(generator, blocks, BLOCK_SIZE, 1, latent.rope),
            "indices": indices,
            "table": table,
            "ends": torch.tensor(ends_of(QUERIES), dtype=torch.int32),
            "lengths": torch.tensor(LENGTHS, dtype=torch.int32),
        }

    def call(query: Tensor, rows: Tensor, indices: Tensor, table: Tensor, **more: Tensor) -> Tensor:
        out = torch_npu.npu_sparse_flash_attention(
            query, rows, rows, indices, scale, block_table=table,
            actual_seq_lengths_query=more["ends"], actual_seq_lengths_kv=more["lengths"],
            query_rope=more["query_rope"], key_rope=more["key_rope"], layout_query="TND",
            layout_kv="PA_BSND", sparse_mode=CAUSAL, attention_mode=ABSORBED,
        )  # fmt: skip
        return out if isinstance(out, Tensor) else out[0]

    def defined(
        query: Tensor, rows: Tensor, indices: Tensor, table: Tensor, **more: Tensor
    ) -> Tensor:
        out, row = torch.empty(tokens, heads, latent.rank), 0
        for request, (new, length) in enumerate(zip(QUERIES, LENGTHS, strict=True)):
            values = rows_of(rows, table[request], length).squeeze(1).float()
            ropes = rows_of(more["key_rope"], table[request], length).squeeze(1).float()
            for _ in range(new):
                some = indices[row, 0][indices[row, 0] >= 0].long()
                scores = query[row].float() @ values[some].T
                scores += more["query_rope"][row].float() @ ropes[some].T
                out[row] = (scores * scale).softmax(-1) @ values[some]
                row += 1
        return out.to(query.dtype)

    return OperatorCall(
        "npu_sparse_flash_attention", "SparseFlashAttention", "bfloat16", make, call, defined
    )
