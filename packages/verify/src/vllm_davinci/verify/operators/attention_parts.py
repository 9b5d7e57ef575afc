"""Attention with sinks, which gpt-oss has, and the merge of results over parts of the keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Generator, Tensor

from vllm_davinci.verify.operators.attention import CAUSAL, attend, causal_mask
from vllm_davinci.verify.operators.call import OperatorCall
from vllm_davinci.verify.operators.operands import BFLOAT16, ends_of, normal
from vllm_davinci.verify.operators.shapes import ModelSizes

LENGTHS = [130, 70]
SINK_HEADS, SINK_KV_HEADS, SINK_SIZE = 64, 8, 64  # of gpt-oss
ALPHA, LIMIT = 1.702, 7.0


def calls(model: ModelSizes) -> Iterator[OperatorCall]:
    if model.latent:
        yield _merge(model, model.latent.value)
    if model.name == "qwen3-8b":  # once, with sizes of gpt-oss
        yield _with_sinks()
        yield _clipped()


def _with_sinks() -> OperatorCall:
    import torch_npu

    tokens, scale = sum(LENGTHS), SINK_SIZE**-0.5

    def make(generator: Generator) -> dict[str, Any]:
        return {
            "query": normal(generator, tokens, SINK_HEADS, SINK_SIZE),
            "key": normal(generator, tokens, SINK_KV_HEADS, SINK_SIZE),
            "value": normal(generator, tokens, SINK_KV_HEADS, SINK_SIZE),
            "sink": normal(generator, SINK_HEADS),
            "mask": causal_mask(),
        }

    def call(query: Tensor, key: Tensor, value: Tensor, sink: Tensor, mask: Tensor) -> Any:
        ends = ends_of(LENGTHS)
        return torch_npu.npu_fused_infer_attention_score_v2(
            query, key, value, learnable_sink=sink, atten_mask=mask, actual_seq_qlen=ends,
            actual_seq_kvlen=ends, num_query_heads=SINK_HEADS, num_key_value_heads=SINK_KV_HEADS,
            softmax_scale=scale, input_layout="TND", sparse_mode=CAUSAL,
        )[0]  # fmt: skip

    def defined(query: Tensor, key: Tensor, value: Tensor, sink: Tensor, mask: Tensor) -> Tensor:
        parts = zip(*(each.split(LENGTHS) for each in (query, key, value)), strict=True)
        outs = []
        for q, k, v in parts:
            out, sums = attend(q, k, v, scale)
            outs.append(out * torch.sigmoid(sums - sink.float())[..., None])
        return torch.cat(outs).to(query.dtype)

    return OperatorCall(
        "npu_fused_infer_attention_score_v2", "FusedInferAttentionScoreV4", "sinks, bfloat16",
        make, call, defined,
    )  # fmt: skip


def _clipped() -> OperatorCall:
    import torch_npu

    def make(generator: Generator) -> dict[str, Any]:
        return {"x": normal(generator, 16, 5760, scale=5.0)}

    def call(x: Tensor) -> Tensor:
        return torch_npu.npu_clipped_swiglu(x, alpha=ALPHA, limit=LIMIT, bias=1.0, interleaved=True)

    def defined(x: Tensor) -> Tensor:
        gate, value = x[:, ::2].float(), x[:, 1::2].float()
        gate, value = gate.clamp_max(LIMIT), value.clamp(-LIMIT, LIMIT)
        return (gate * torch.sigmoid(ALPHA * gate) * (value + 1)).to(x.dtype)

    return OperatorCall(
        "npu_clipped_swiglu", "ClippedSwiglu", "16 tokens, bfloat16", make, call, defined
    )


def _merge(model: ModelSizes, size: int) -> OperatorCall:
    """Results of two parts of the keys, by their log of sums."""
    import torch_npu

    rows = 16 * model.heads

    def make(generator: Generator) -> dict[str, Any]:
        return {
            "sums": [normal(generator, rows, dtype=torch.float32) for _ in range(2)],
            "parts": [normal(generator, rows, size, dtype=BFLOAT16) for _ in range(2)],
        }

    def call(sums: list[Tensor], parts: list[Tensor]) -> Any:
        return torch_npu.npu_attention_update(sums, parts, 1)

    def defined(sums: list[Tensor], parts: list[Tensor]) -> list[Tensor]:
        both = torch.stack(sums)
        whole = both.logsumexp(0)
        weights = (both - whole).exp().unsqueeze(-1)
        return [(torch.stack(parts).float() * weights).sum(0).to(BFLOAT16), whole]

    return OperatorCall(
        "npu_attention_update", "AttentionUpdate", "2 parts, bfloat16", make, call, defined
    )
