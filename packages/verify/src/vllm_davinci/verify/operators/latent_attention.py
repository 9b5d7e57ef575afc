"""Multi-head latent attention. Source: DeepSeek-V2 technical report, section 2.1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Generator, Tensor

from vllm_davinci.verify.operators.attention import (
    CAUSAL,
    STEPS,
    attend,
    causal_mask,
    rows_of,
)
from vllm_davinci.verify.operators.call import OperatorCall
from vllm_davinci.verify.operators.norms import normalized
from vllm_davinci.verify.operators.operands import (
    BLOCK_SIZE,
    DTYPES,
    blocks_of,
    cos_sin,
    ends_of,
    gains,
    name_of,
    normal,
    slots_of,
)
from vllm_davinci.verify.operators.rotary import rotated_pairs
from vllm_davinci.verify.operators.shapes import LatentSizes, ModelSizes

LENGTHS = [300, 7, 128, 129]


def calls(model: ModelSizes) -> Iterator[OperatorCall]:
    if model.latent is None:
        return
    for dtype in DTYPES:
        yield _decodes(model, model.latent, dtype)
        yield _prefill(model, model.latent, dtype)
        yield _writes(model, model.latent, dtype)
        yield _gathers(model.latent, dtype)


def _decodes(model: ModelSizes, latent: LatentSizes, dtype: torch.dtype) -> OperatorCall:
    """One new token of each request over compressed rows, which are keys and values."""
    import torch_npu

    heads, scale = model.heads, (latent.nope + latent.rope) ** -0.5

    def make(generator: Generator) -> dict[str, Any]:
        table, blocks = blocks_of(generator, LENGTHS)
        return {
            "query": normal(generator, len(LENGTHS), heads, latent.rank, dtype=dtype),
            "rows": normal(generator, blocks, BLOCK_SIZE, latent.rank, dtype=dtype, scale=0.3),
            "query_rope": normal(generator, len(LENGTHS), heads, latent.rope, dtype=dtype),
            "key_rope": normal(generator, blocks, BLOCK_SIZE, latent.rope, dtype=dtype),
            "table": table,
        }

    def call(
        query: Tensor, rows: Tensor, query_rope: Tensor, key_rope: Tensor, table: Tensor
    ) -> Tensor:
        out, _ = torch_npu.npu_fused_infer_attention_score(
            query, rows, rows, query_rope=query_rope, key_rope=key_rope, block_table=table,
            actual_seq_lengths=ends_of([1] * len(LENGTHS)), actual_seq_lengths_kv=LENGTHS,
            num_heads=heads, num_key_value_heads=1, scale=scale, input_layout="TND_NTD",
            block_size=BLOCK_SIZE,
        )  # fmt: skip
        return out

    def defined(
        query: Tensor, rows: Tensor, query_rope: Tensor, key_rope: Tensor, table: Tensor
    ) -> Tensor:
        queries = torch.cat([query, query_rope], -1)
        outs = []
        for own, blocks, length in zip(queries.split(1), table, LENGTHS, strict=True):
            values = rows_of(rows.unsqueeze(2), blocks, length)
            keys = torch.cat([values, rows_of(key_rope.unsqueeze(2), blocks, length)], -1)
            outs.append(attend(own, keys, values, scale)[0])
        return torch.cat(outs).transpose(0, 1).to(query.dtype)

    return OperatorCall(
        "npu_fused_infer_attention_score", "FusedInferAttentionScoreV3",
        f"decode over compressed rows, {name_of(dtype)}", make, call, defined,
    )  # fmt: skip


def _prefill(model: ModelSizes, latent: LatentSizes, dtype: torch.dtype) -> OperatorCall:
    """Keys and values expanded per head; the rotary part beside the rest."""
    import torch_npu

    lengths, heads = [130, 70], model.heads
    scale = (latent.nope + latent.rope) ** -0.5
    sizes = {"query": latent.nope, "key": latent.nope, "value": latent.value}
    sizes |= {"query_rope": latent.rope, "key_rope": latent.rope}

    def make(generator: Generator) -> dict[str, Any]:
        made: dict[str, Any] = {
            name: normal(generator, sum(lengths), heads, size, dtype=dtype)
            for name, size in sizes.items()
        }
        return {**made, "mask": causal_mask()}

    def call(query: Tensor, key: Tensor, value: Tensor, **more: Tensor) -> Any:
        ends = ends_of(lengths)
        return torch_npu.npu_fused_infer_attention_score(
            query, key, value, query_rope=more["query_rope"], key_rope=more["key_rope"],
            atten_mask=more["mask"], actual_seq_lengths=ends, actual_seq_lengths_kv=ends,
            num_heads=heads, num_key_value_heads=heads, scale=scale, input_layout="TND",
            sparse_mode=CAUSAL, softmax_lse_flag=True,
        )  # fmt: skip

    def defined(query: Tensor, key: Tensor, value: Tensor, **more: Tensor) -> list[Tensor]:
        whole = (
            torch.cat([query, more["query_rope"]], -1),
            torch.cat([key, more["key_rope"]], -1),
            value,
        )
        parts = zip(*(each.split(lengths) for each in whole), strict=True)
        done = [attend(q, k, v, scale) for q, k, v in parts]
        outs, sums = (torch.cat(each) for each in zip(*done, strict=True))
        return [outs.to(query.dtype), sums.unsqueeze(-1)]

    return OperatorCall(
        "npu_fused_infer_attention_score", "FusedInferAttentionScoreV3",
        f"prefill of latent attention, {name_of(dtype)}", make, call, defined,
    )  # fmt: skip


def _writes(model: ModelSizes, latent: LatentSizes, dtype: torch.dtype) -> OperatorCall:
    """Norm, rotation and cache of a step's compressed rows."""
    import torch_npu

    queries, lengths = STEPS["mixed"]
    tokens = sum(queries)

    def make(generator: Generator) -> dict[str, Any]:
        table, blocks = blocks_of(generator, lengths)
        cos, sin = cos_sin(generator, tokens, 1, 1, latent.rope, dtype=dtype)
        return {
            "rows": normal(generator, tokens, 1, 1, latent.rank + latent.rope, dtype=dtype),
            "weight": gains(generator, latent.rank, dtype),
            "cos": cos,
            "sin": sin,
            "slots": slots_of(table, queries, lengths).long(),
            "k_pe": torch.zeros(blocks, BLOCK_SIZE, 1, latent.rope, dtype=dtype),
            "kv_c": torch.zeros(blocks, BLOCK_SIZE, 1, latent.rank, dtype=dtype),
        }

    def call(
        rows: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, k_pe: Tensor,
        kv_c: Tensor,
    ) -> list[Tensor]:  # fmt: skip
        _, _, turned, normed = torch_npu.npu_kv_rmsnorm_rope_cache(
            rows, weight, cos, sin, slots, k_pe, kv_c, epsilon=model.epsilon,
            cache_mode="PA_BNSD", is_output_kv=True,
        )  # fmt: skip
        return [k_pe, kv_c, turned, normed]

    def defined(
        rows: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, k_pe: Tensor,
        kv_c: Tensor,
    ) -> list[Tensor]:  # fmt: skip
        normed = normalized(rows[..., : latent.rank], weight, model.epsilon)
        turned = rotated_pairs(rows[..., latent.rank :], cos, sin)
        k_pe.view(-1, latent.rope)[slots] = turned.flatten(0, 2)
        kv_c.view(-1, latent.rank)[slots] = normed.flatten(0, 2)
        return [k_pe, kv_c, turned, normed]

    return OperatorCall(
        "npu_kv_rmsnorm_rope_cache", "KvRmsNormRopeCache", f"mixed, {name_of(dtype)}", make, call,
        defined,
    )  # fmt: skip


def _gathers(latent: LatentSizes, dtype: torch.dtype) -> OperatorCall:
    """Cached context of prefills, from blocks to rows."""
    import torch_npu

    lengths = [130, 7]

    def make(generator: Generator) -> dict[str, Any]:
        table, blocks = blocks_of(generator, lengths)
        return {
            "kv_c": normal(generator, blocks, BLOCK_SIZE, 1, latent.rank, dtype=dtype),
            "k_pe": normal(generator, blocks, BLOCK_SIZE, 1, latent.rope, dtype=dtype),
            "table": table,
            "lengths": torch.tensor(lengths, dtype=torch.int32),
            "starts": torch.zeros(len(lengths), dtype=torch.int32),
        }

    def call(
        kv_c: Tensor, k_pe: Tensor, table: Tensor, lengths: Tensor, starts: Tensor
    ) -> list[Tensor]:
        outs = [each.new_zeros(137, 1, each.shape[-1]) for each in (kv_c, k_pe)]
        torch_npu.npu_gather_pa_kv_cache(kv_c, k_pe, table, lengths, *outs, seq_offset=starts)
        return outs

    def defined(
        kv_c: Tensor, k_pe: Tensor, table: Tensor, lengths: Tensor, starts: Tensor
    ) -> list[Tensor]:
        return [
            torch.cat([rows_of(each, own, n) for own, n in zip(table, lengths.tolist(),
                                                               strict=True)])
            for each in (kv_c, k_pe)
        ]  # fmt: skip

    return OperatorCall(
        "npu_gather_pa_kv_cache", "GatherPaKvCache", name_of(dtype), make, call, defined,
        exact=True,
    )  # fmt: skip
