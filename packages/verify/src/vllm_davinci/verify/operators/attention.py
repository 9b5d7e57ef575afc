"""Grouped-query attention: the cache's writes, decodes and prefills over it.

Source of definitions: Vaswani et al. 2017, eq. 1; sparse modes as CANN's documents state them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Generator, Tensor

from vllm_davinci.verify.operators.call import OperatorCall
from vllm_davinci.verify.operators.operands import (
    BLOCK_SIZE,
    DTYPES,
    blocks_of,
    ends_of,
    name_of,
    normal,
    slots_of,
)
from vllm_davinci.verify.operators.shapes import ModelSizes

# Requests of a step: new tokens, and all tokens.
STEPS = {
    "decode": ([1, 1, 1, 1], [300, 7, 128, 129]),
    "prefill": ([200], [200]),
    "mixed": ([1, 70, 3], [513, 200, 3]),
}
CAUSAL = 3
MASK_SIZE = 2048


def causal_mask() -> Tensor:
    """[2048, 2048], int8, ones above the diagonal."""
    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.int8).triu(1)


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One request, causal from the last query back: [queries, heads, size] and the log of sums.

    query: [queries, heads, size]; key, value: [keys, key heads, size]. fp32.
    """
    repeats = query.shape[1] // key.shape[1]
    keys, values = (each.float().repeat_interleave(repeats, 1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * scale
    hidden = torch.ones(len(query), len(key), dtype=torch.bool).triu(1 + len(key) - len(query))
    scores = scores.masked_fill(hidden, -torch.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return out, scores.logsumexp(-1).t()


def rows_of(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """[length, heads, size] of one request, from a cache [blocks, block size, heads, size]."""
    return cache[table.long()].flatten(0, 1)[:length]


def calls(model: ModelSizes) -> Iterator[OperatorCall]:
    if model.latent:
        return
    for dtype in DTYPES:
        for step in STEPS:
            yield _over_the_cache(model, step, dtype)
            yield _writes(model, step, dtype)
        yield _over_itself(model, dtype)


def _over_the_cache(model: ModelSizes, step: str, dtype: torch.dtype) -> OperatorCall:
    import torch_npu

    queries, lengths = STEPS[step]
    heads, kv_heads, size = model.heads, model.kv_heads, model.head_size

    def make(generator: Generator) -> dict[str, Any]:
        table, blocks = blocks_of(generator, lengths)
        return {
            "query": normal(generator, sum(queries), heads, size, dtype=dtype),
            "key": normal(generator, blocks, BLOCK_SIZE, kv_heads, size, dtype=dtype),
            "value": normal(generator, blocks, BLOCK_SIZE, kv_heads, size, dtype=dtype),
            "table": table,
            "mask": causal_mask(),
            "ends": ends_of(queries),
            "lengths": lengths,
            "scale": size**-0.5,
        }

    def call(
        query: Tensor, key: Tensor, value: Tensor, table: Tensor, mask: Tensor, ends: list[int],
        lengths: list[int], scale: float,
    ) -> Tensor:  # fmt: skip
        out, _ = torch_npu.npu_fused_infer_attention_score(
            query, key.flatten(2), value.flatten(2), atten_mask=mask, block_table=table,
            actual_seq_lengths=ends, actual_seq_lengths_kv=lengths, num_heads=heads,
            num_key_value_heads=kv_heads, scale=scale, input_layout="TND", block_size=BLOCK_SIZE,
            sparse_mode=CAUSAL,
        )  # fmt: skip
        return out

    def defined(
        query: Tensor, key: Tensor, value: Tensor, table: Tensor, mask: Tensor, ends: list[int],
        lengths: list[int], scale: float,
    ) -> Tensor:  # fmt: skip
        parts = query.split(queries)
        requests = zip(parts, table, lengths, strict=True)
        return torch.cat(
            [
                attend(own, rows_of(key, blocks, length), rows_of(value, blocks, length), scale)[0]
                for own, blocks, length in requests
            ]
        ).to(query.dtype)

    return OperatorCall(
        "npu_fused_infer_attention_score", "FusedInferAttentionScoreV3",
        f"{step} over blocks, {name_of(dtype)}", make, call, defined,
    )  # fmt: skip


def _over_itself(model: ModelSizes, dtype: torch.dtype) -> OperatorCall:
    import torch_npu

    lengths = [130, 70]
    heads, kv_heads, size = model.heads, model.kv_heads, model.head_size

    def make(generator: Generator) -> dict[str, Any]:
        return {
            "query": normal(generator, sum(lengths), heads, size, dtype=dtype),
            "key": normal(generator, sum(lengths), kv_heads, size, dtype=dtype),
            "value": normal(generator, sum(lengths), kv_heads, size, dtype=dtype),
            "mask": causal_mask(),
            "ends": ends_of(lengths),
            "scale": size**-0.5,
        }

    def call(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor, ends: list[int], scale: float
    ) -> Any:
        return torch_npu.npu_fused_infer_attention_score(
            query, key, value, atten_mask=mask, actual_seq_lengths=ends,
            actual_seq_lengths_kv=ends, num_heads=heads, num_key_value_heads=kv_heads, scale=scale,
            input_layout="TND", sparse_mode=CAUSAL, softmax_lse_flag=True,
        )  # fmt: skip

    def defined(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor, ends: list[int], scale: float
    ) -> list[Tensor]:
        parts = zip(*(each.split(lengths) for each in (query, key, value)), strict=True)
        done = [attend(q, k, v, scale) for q, k, v in parts]
        outs, sums = (torch.cat(each) for each in zip(*done, strict=True))
        return [outs.to(query.dtype), sums.unsqueeze(-1)]

    return OperatorCall(
        "npu_fused_infer_attention_score", "FusedInferAttentionScoreV3",
        f"prefill, {name_of(dtype)}", make, call, defined,
    )  # fmt: skip


def _writes(model: ModelSizes, step: str, dtype: torch.dtype) -> OperatorCall:
    import torch_npu

    queries, lengths = STEPS[step]
    heads, size = model.kv_heads, model.head_size

    def make(generator: Generator) -> dict[str, Any]:
        table, blocks = blocks_of(generator, lengths)
        rows = (normal(generator, sum(queries), heads, size, dtype=dtype) for _ in range(2))
        caches = (torch.zeros(blocks, BLOCK_SIZE, heads, size, dtype=dtype) for _ in range(2))
        named = dict(zip(("key", "value", "key_cache", "value_cache"), (*rows, *caches),
                         strict=True))  # fmt: skip
        return {**named, "slots": slots_of(table, queries, lengths)}

    def call(
        key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
    ) -> list[Tensor]:
        torch_npu.npu_scatter_pa_kv_cache(
            key, value, key_cache, value_cache, slots, cache_mode="Norm"
        )
        return [key_cache, value_cache]

    def defined(
        key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
    ) -> list[Tensor]:
        for cache, rows in ((key_cache, key), (value_cache, value)):
            cache.view(-1, heads, size)[slots.long()] = rows
        return [key_cache, value_cache]

    return OperatorCall(
        "npu_scatter_pa_kv_cache", "ScatterPaKvCache", f"{step}, {name_of(dtype)}", make, call,
        defined, exact=True,
    )  # fmt: skip
