"""The stage before latent attention: what it returns, and how one compiled operator does it."""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from vllm_davinci.core.ops.compiled import compiled
from vllm_davinci.core.ops.layernorm import NPURMSNorm
from vllm_davinci.core.ops.linear import plain_weight

if TYPE_CHECKING:
    from vllm_davinci.core.attention.mla_metadata import NPUMLAMetadata
    from vllm_davinci.core.ops.mla import NPUMultiHeadLatentAttention


class Preprocessed(NamedTuple):
    """What attention needs of a step's tokens; the cache holds their latent and rotary rows.

    absorbed: [num_decode_tokens, num_heads, kv_lora_rank], or None without decodes
    q_rope:   [num_tokens, num_heads, qk_rope_head_dim], rotated
    q_nope:   [num_prefill_tokens, num_heads, qk_nope_head_dim], strided
    latent:   [num_prefill_tokens, kv_lora_rank], normalized
    k_rope:   [num_prefill_tokens, qk_rope_head_dim], rotated
    Without prefills the last three are empty, or None.
    """

    absorbed: torch.Tensor | None
    q_rope: torch.Tensor
    q_nope: torch.Tensor | None
    latent: torch.Tensor | None
    k_rope: torch.Tensor | None


class ProjectionWeights(NamedTuple):
    """Weights as a product takes them, [in_features, out_features].

    down: to the queries' and the keys' and values' compressed rows
    norm: of the compressed queries, or None when queries are not compressed
    up:   to the queries
    """

    down: torch.Tensor
    norm: torch.Tensor | None
    up: torch.Tensor


def projection_weights(block: "NPUMultiHeadLatentAttention") -> ProjectionWeights | None:
    """None when a projection is more than a product: quantized, with a bias, or adapted."""
    norm = None
    if not _is_plain_norm(block.kv_a_layernorm):
        return None
    if block.q_lora_rank is None:
        down, up = plain_weight(block.kv_a_proj_with_mqa), plain_weight(block.q_proj)
    else:
        if not _is_plain_norm(block.q_a_layernorm):
            return None
        down, up = plain_weight(block.fused_qkv_a_proj), plain_weight(block.q_b_proj)
        norm = block.q_a_layernorm.weight
    return None if down is None or up is None else ProjectionWeights(down, norm, up)


def _is_plain_norm(norm: Any) -> bool:
    return isinstance(norm, NPURMSNorm) and norm.is_plain


def preprocess_at_once(
    block: "NPUMultiHeadLatentAttention",
    positions: torch.Tensor,
    hidden_states: torch.Tensor,
    metadata: "NPUMLAMetadata",
    side_stream: torch.Stream | None = None,
) -> Preprocessed | None:
    """The block's `preprocess` in one call, or None when no compiled operator can do it.

    side_stream: where the key-value path and the rotation of queries run, beside the rest; the
                 current stream ends behind them
    """
    stage = compiled("mla_preprocess")
    weights = None if stage is None else projection_weights(block)
    if stage is None or weights is None:
        return None
    table = block.rotary_emb._match_cos_sin_cache_dtype(hidden_states)
    cos, sin = metadata.rotary_rows(table, positions)
    cache = block.mla_attn.bound_cache
    num_decode_tokens = metadata.num_decode_tokens
    absorbed, q_rope, q, latent, k_rope = stage(
        hidden_states,
        weights.down,
        weights.norm,
        weights.up,
        block.kv_a_layernorm.weight,
        block.mla_attn.impl.up_key,
        cos,
        sin,
        metadata.slot_mapping,
        cache.latent,
        cache.rotary,
        0.0 if weights.norm is None else block.q_a_layernorm.variance_epsilon,
        block.kv_a_layernorm.variance_epsilon,
        num_decode_tokens,
        side_stream,
    )
    if q is None:  # no prefills
        return Preprocessed(absorbed, q_rope, None, None, None)
    return Preprocessed(
        absorbed,
        q_rope,
        q[num_decode_tokens:, :, : block.qk_nope_head_dim],
        latent[num_decode_tokens:],
        k_rope[num_decode_tokens:],
    )
