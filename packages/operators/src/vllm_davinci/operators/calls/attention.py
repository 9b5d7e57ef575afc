"""Grouped-query attention: the cache's writes, decodes and prefills, sinks, the merge of parts."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from vllm_davinci.operators import attention
from vllm_davinci.operators.attention import attend, visible_keys
from vllm_davinci.operators.calls.call import OperatorCall, npu
from vllm_davinci.operators.calls.operands import (
    BFLOAT16,
    BLOCK_SIZE,
    CAUSAL,
    CAUSAL_MASK,
    DTYPES,
    FLOAT32,
    STEPS,
    blocks_of,
    ends_of,
    name_of,
    normal,
    slots_of,
    zeros,
)
from vllm_davinci.operators.calls.sizes import ModelSizes
from vllm_davinci.operators.kv_cache import scatter_rows

LENGTHS = [130, 70]  # of prefills without cached tokens
SINK_HEADS, SINK_KV_HEADS, SINK_SIZE = 64, 8, 64  # of gpt-oss


def calls(model: ModelSizes) -> Iterator[OperatorCall]:
    if model.latent:
        yield _merge(model, model.latent.value)
        return
    for dtype, step in product(DTYPES, STEPS):
        yield _over_the_cache(model, step, dtype)
        yield _writes(model, step, dtype)
    for dtype in DTYPES:
        yield _over_itself(model, dtype)
    if model.has_common:  # once, with sizes of gpt-oss
        yield _with_sinks()


def _over_the_cache(model: ModelSizes, step: str, dtype: torch.dtype) -> OperatorCall:
    queries, lengths = STEPS[step]
    heads, kv_heads, size = model.heads, model.kv_heads, model.head_size
    ends, scale, table = ends_of(queries), size**-0.5, blocks_of(lengths)
    cache = normal(table.numel(), BLOCK_SIZE, kv_heads, size, dtype=dtype)

    def call(query: Tensor, key: Tensor, value: Tensor, table: Tensor, mask: Tensor) -> Any:
        return npu.npu_fused_infer_attention_score(
            query, key.flatten(2), value.flatten(2), atten_mask=mask, block_table=table,
            actual_seq_lengths=ends, actual_seq_lengths_kv=lengths, num_heads=heads,
            num_key_value_heads=kv_heads, scale=scale, input_layout="TND", block_size=BLOCK_SIZE,
            sparse_mode=CAUSAL,
        )[0]  # fmt: skip

    def defined(query: Tensor, key: Tensor, value: Tensor, table: Tensor, mask: Tensor) -> Tensor:
        out = torch.empty_like(query)
        caches = query, None, None, key, value, None, table
        attention.paged_attention(*caches, ends, lengths, mask, scale, CAUSAL, 0, 0, out)
        return out

    return OperatorCall(
        "npu_fused_infer_attention_score", "FusedInferAttentionScoreV3",
        f"{step} over blocks, {name_of(dtype)}",
        {
            "query": normal(sum(queries), heads, size, dtype=dtype),
            "key": cache,
            "value": cache,
            "table": table,
            "mask": CAUSAL_MASK,
        },
        call, defined,
    )  # fmt: skip


def _over_itself(model: ModelSizes, dtype: torch.dtype) -> OperatorCall:
    heads, kv_heads, size = model.heads, model.kv_heads, model.head_size
    ends, scale = ends_of(LENGTHS), size**-0.5
    rows = normal(sum(LENGTHS), kv_heads, size, dtype=dtype)

    def call(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Any:
        return npu.npu_fused_infer_attention_score(
            query, key, value, atten_mask=mask, actual_seq_lengths=ends,
            actual_seq_lengths_kv=ends, num_heads=heads, num_key_value_heads=kv_heads, scale=scale,
            input_layout="TND", sparse_mode=CAUSAL, softmax_lse_flag=True,
        )  # fmt: skip

    def defined(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Any:
        whole = query, key, value, None, None
        return attention.prefill_attention(*whole, ends, ends, mask, scale, CAUSAL, 0, 0, True)

    return OperatorCall(
        "npu_fused_infer_attention_score", "FusedInferAttentionScoreV3",
        f"prefill, {name_of(dtype)}",
        {
            "query": normal(sum(LENGTHS), heads, size, dtype=dtype),
            "key": rows,
            "value": rows,
            "mask": CAUSAL_MASK,
        },
        call, defined,
    )  # fmt: skip


def _writes(model: ModelSizes, step: str, dtype: torch.dtype) -> OperatorCall:
    queries, lengths = STEPS[step]
    sizes = model.kv_heads, model.head_size
    rows = normal(sum(queries), *sizes, dtype=dtype)
    cache = zeros(blocks_of(lengths).numel(), BLOCK_SIZE, *sizes, dtype=dtype)

    def call(
        key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
    ) -> list[Tensor]:
        npu.npu_scatter_pa_kv_cache(key, value, key_cache, value_cache, slots, cache_mode="Norm")
        return [key_cache, value_cache]

    def defined(
        key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
    ) -> list[Tensor]:
        return [scatter_rows(key_cache, slots, key), scatter_rows(value_cache, slots, value)]

    return OperatorCall(
        "npu_scatter_pa_kv_cache", "ScatterPaKvCache", f"{step}, {name_of(dtype)}",
        {
            "key": rows,
            "value": rows,
            "key_cache": cache,
            "value_cache": cache,
            "slots": slots_of(queries, lengths),
        },
        call, defined, exact=True,
    )  # fmt: skip


def _with_sinks() -> OperatorCall:
    tokens, scale, ends = sum(LENGTHS), SINK_SIZE**-0.5, ends_of(LENGTHS)

    def call(query: Tensor, key: Tensor, value: Tensor, sink: Tensor, mask: Tensor) -> Any:
        return npu.npu_fused_infer_attention_score_v2(
            query, key, value, learnable_sink=sink, atten_mask=mask, actual_seq_qlen=ends,
            actual_seq_kvlen=ends, num_query_heads=SINK_HEADS, num_key_value_heads=SINK_KV_HEADS,
            softmax_scale=scale, input_layout="TND", sparse_mode=CAUSAL,
        )[0]  # fmt: skip

    def defined(query: Tensor, key: Tensor, value: Tensor, sink: Tensor, mask: Tensor) -> Tensor:
        parts = zip(*(each.split(LENGTHS) for each in (query, key, value)), strict=True)
        outs = [
            attend(q, k, v, scale, visible_keys(len(q), len(k), CAUSAL), sink=sink)[0]
            for q, k, v in parts
        ]
        return torch.cat(outs).to(query.dtype)

    return OperatorCall(
        "npu_fused_infer_attention_score_v2", "FusedInferAttentionScoreV4", "sinks, bfloat16",
        {
            "query": normal(tokens, SINK_HEADS, SINK_SIZE),
            "key": normal(tokens, SINK_KV_HEADS, SINK_SIZE),
            "value": normal(tokens, SINK_KV_HEADS, SINK_SIZE),
            "sink": normal(SINK_HEADS),
            "mask": CAUSAL_MASK,
        },
        call, defined,
    )  # fmt: skip


def _merge(model: ModelSizes, size: int) -> OperatorCall:
    """Merges the results over two parts of the keys, by their log-sum-exp."""
    rows = 16 * model.heads

    def defined(first: Tensor, second: Tensor, sums: Tensor) -> list[Tensor]:
        whole = sums.logsumexp(0)
        weights = (sums - whole).exp().unsqueeze(-1)
        return [(torch.stack([first, second]).float() * weights).sum(0).to(BFLOAT16), whole]

    return OperatorCall(
        "npu_attention_update", "AttentionUpdate", "2 parts, bfloat16",
        {
            "first": normal(rows, size),
            "second": normal(rows, size),
            "sums": normal(2, rows, dtype=FLOAT32),
        },
        lambda first, second, sums: npu.npu_attention_update(
            [each.contiguous() for each in sums], [first, second], 1
        ),
        defined,
    )  # fmt: skip
