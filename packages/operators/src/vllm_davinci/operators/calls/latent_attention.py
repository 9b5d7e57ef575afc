"""MLA: decodes over compressed rows, prefills, cache writes and reads."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from vllm_davinci.operators.attention import attend, prefill_attention, rows_of
from vllm_davinci.operators.calls.call import OperatorCall, npu
from vllm_davinci.operators.calls.operands import (
    BLOCK_SIZE,
    CAUSAL,
    CAUSAL_MASK,
    DTYPES,
    STEPS,
    blocks_of,
    cos_sin,
    ends_of,
    gains,
    name_of,
    normal,
    slots_of,
    zeros,
)
from vllm_davinci.operators.calls.sizes import LatentSizes, ModelSizes
from vllm_davinci.operators.kv_cache import scatter_rows
from vllm_davinci.operators.norm import rms_norm
from vllm_davinci.operators.rotary import rotated_pairs

DECODE_LENGTHS = STEPS["decode"][1]
PREFILL_LENGTHS = [130, 70]


def calls(model: ModelSizes) -> Iterator[OperatorCall]:
    if model.latent is None:
        return
    for dtype in DTYPES:
        yield _decodes(model, model.latent, dtype)
        yield _prefill(model, model.latent, dtype)
        yield _writes(model, model.latent, dtype)
        yield _gathers(model.latent, dtype)


def _decodes(model: ModelSizes, latent: LatentSizes, dtype: torch.dtype) -> OperatorCall:
    """Decodes, one token per request, over compressed rows as keys and values."""
    heads, scale, lengths = model.heads, (latent.nope + latent.rope) ** -0.5, DECODE_LENGTHS
    table = blocks_of(lengths)
    blocks = table.numel(), BLOCK_SIZE

    def call(
        query: Tensor, rows: Tensor, query_rope: Tensor, key_rope: Tensor, table: Tensor
    ) -> Any:
        return npu.npu_fused_infer_attention_score(
            query, rows, rows, query_rope=query_rope, key_rope=key_rope, block_table=table,
            actual_seq_lengths=ends_of([1] * len(lengths)), actual_seq_lengths_kv=lengths,
            num_heads=heads, num_key_value_heads=1, scale=scale, input_layout="TND_NTD",
            block_size=BLOCK_SIZE,
        )[0]  # fmt: skip

    def defined(
        query: Tensor, rows: Tensor, query_rope: Tensor, key_rope: Tensor, table: Tensor
    ) -> Tensor:
        whole, outs = torch.cat([rows, key_rope], -1).unsqueeze(2), []
        queries = torch.cat([query, query_rope], -1).split(1)
        for own, own_blocks, length in zip(queries, table, lengths, strict=True):
            keys = rows_of(whole, own_blocks, length)
            outs.append(attend(own, keys, keys[..., : latent.rank], scale)[0])
        return torch.cat(outs).transpose(0, 1).to(query.dtype)

    return OperatorCall(
        "npu_fused_infer_attention_score", "FusedInferAttentionScoreV3",
        f"decode over compressed rows, {name_of(dtype)}",
        {
            "query": normal(len(lengths), heads, latent.rank, dtype=dtype),
            "rows": normal(*blocks, latent.rank, dtype=dtype, scale=0.3),
            "query_rope": normal(len(lengths), heads, latent.rope, dtype=dtype),
            "key_rope": normal(*blocks, latent.rope, dtype=dtype),
            "table": table,
        },
        call, defined,
    )  # fmt: skip


def _prefill(model: ModelSizes, latent: LatentSizes, dtype: torch.dtype) -> OperatorCall:
    """Prefills with keys and values expanded per head, and the rotary part separate."""
    heads, ends, scale = model.heads, ends_of(PREFILL_LENGTHS), (latent.nope + latent.rope) ** -0.5
    sizes = {"query": latent.nope, "key": latent.nope, "value": latent.value}
    sizes |= {"query_rope": latent.rope, "key_rope": latent.rope}

    def call(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **ropes: Tensor) -> Any:
        return npu.npu_fused_infer_attention_score(
            query, key, value, atten_mask=mask, actual_seq_lengths=ends,
            actual_seq_lengths_kv=ends, num_heads=heads, num_key_value_heads=heads, scale=scale,
            input_layout="TND", sparse_mode=CAUSAL, softmax_lse_flag=True, **ropes,
        )  # fmt: skip

    def defined(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **ropes: Tensor) -> Any:
        whole = query, key, value, ropes["query_rope"], ropes["key_rope"]
        return prefill_attention(*whole, ends, ends, mask, scale, CAUSAL, 0, 0, True)

    return OperatorCall(
        "npu_fused_infer_attention_score", "FusedInferAttentionScoreV3",
        f"prefill of latent attention, {name_of(dtype)}",
        {
            **{
                name: normal(sum(PREFILL_LENGTHS), heads, size, dtype=dtype)
                for name, size in sizes.items()
            },
            "mask": CAUSAL_MASK,
        },
        call, defined,
    )  # fmt: skip


def _writes(model: ModelSizes, latent: LatentSizes, dtype: torch.dtype) -> OperatorCall:
    """Norm, rotation and cache write of a step's compressed rows."""
    queries, lengths = STEPS["mixed"]
    blocks = blocks_of(lengths).numel(), BLOCK_SIZE, 1

    def call(
        rows: Tensor, weight: Tensor, slots: Tensor, k_pe: Tensor, kv_c: Tensor, **turn: Tensor
    ) -> list[Tensor]:
        _, _, turned, normed = npu.npu_kv_rmsnorm_rope_cache(
            rows, weight, turn["cos"], turn["sin"], slots, k_pe, kv_c, epsilon=model.epsilon,
            cache_mode="PA_BNSD", is_output_kv=True,
        )  # fmt: skip
        return [k_pe, kv_c, turned, normed]

    def defined(
        rows: Tensor, weight: Tensor, slots: Tensor, k_pe: Tensor, kv_c: Tensor, **turn: Tensor
    ) -> list[Tensor]:
        normed = rms_norm(rows[..., : latent.rank], weight, model.epsilon)
        turned = rotated_pairs(rows[..., latent.rank :], turn["cos"], turn["sin"])
        scatter_rows(k_pe, slots, turned.flatten(0, 1))
        scatter_rows(kv_c, slots, normed.flatten(0, 1))
        return [k_pe, kv_c, turned, normed]

    return OperatorCall(
        "npu_kv_rmsnorm_rope_cache", "KvRmsNormRopeCache", f"mixed, {name_of(dtype)}",
        {
            "rows": normal(sum(queries), 1, 1, latent.rank + latent.rope, dtype=dtype),
            "weight": gains(latent.rank, dtype),
            **cos_sin(sum(queries), 1, 1, latent.rope, dtype=dtype),
            "slots": slots_of(queries, lengths).long(),
            "k_pe": zeros(*blocks, latent.rope, dtype=dtype),
            "kv_c": zeros(*blocks, latent.rank, dtype=dtype),
        },
        call, defined,
    )  # fmt: skip


def _gathers(latent: LatentSizes, dtype: torch.dtype) -> OperatorCall:
    """Gathers prefills' cached context from blocks into rows."""
    counts = [130, 7]
    table = blocks_of(counts)
    blocks = table.numel(), BLOCK_SIZE, 1

    def call(kv_c: Tensor, k_pe: Tensor, table: Tensor, lengths: Tensor, starts: Tensor) -> Any:
        outs = [each.new_zeros(sum(counts), 1, each.shape[-1]) for each in (kv_c, k_pe)]
        npu.npu_gather_pa_kv_cache(kv_c, k_pe, table, lengths, *outs, seq_offset=starts)
        return outs

    def defined(kv_c: Tensor, k_pe: Tensor, table: Tensor, **_: Tensor) -> list[Tensor]:
        return [
            torch.cat([rows_of(each, own, n) for own, n in zip(table, counts, strict=True)])
            for each in (kv_c, k_pe)
        ]

    return OperatorCall(
        "npu_gather_pa_kv_cache", "GatherPaKvCache", name_of(dtype),
        {
            "kv_c": normal(*blocks, latent.rank, dtype=dtype),
            "k_pe": normal(*blocks, latent.rope, dtype=dtype),
            "table": table,
            "lengths": torch.tensor(counts, dtype=torch.int32),
            "starts": torch.zeros(len(counts), dtype=torch.int32),
        },
        call, defined, exact=True,
    )  # fmt: skip
