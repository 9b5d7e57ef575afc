"""The stage before MLA: what it returns, and how one compiled operator does it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from vllm_davinci.core.components.fused_ops import compiled
from vllm_davinci.core.layers.linear import plain_weight
from vllm_davinci.core.layers.norm import NPURMSNorm
from vllm_davinci.core.quantization.linear_method import QuantizedLinearMethodBase
from vllm_davinci.core.quantization.quant_matmul import QuantMatmul

if TYPE_CHECKING:
    from vllm_davinci.core.attention.mla.layer import NPUMultiHeadLatentAttention
    from vllm_davinci.core.attention.mla.metadata import NPUMLAMetadata


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


class FloatProjections(NamedTuple):
    """Weights as a product takes them, [in_features, out_features].

    down: to the queries' and the keys' and values' compressed rows
    norm: weight of the compressed queries' norm, or None when queries are not compressed
    up:   to the queries
    """

    down: torch.Tensor
    norm: torch.Tensor | None
    up: torch.Tensor

    @property
    def operator(self) -> Callable[..., Any] | None:
        return compiled("mla_preprocess")

    def arguments(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """What the operator takes first."""
        return hidden_states, self.down, self.norm, self.up


class QuantizedProjections(NamedTuple):
    """As FloatProjections, of int8. All rows have scales of their own, or none has.

    norm_bias: of the compressed queries' norm, or None
    """

    down: QuantMatmul
    norm: torch.Tensor | None
    norm_bias: torch.Tensor | None
    up: QuantMatmul

    @property
    def operator(self) -> Callable[..., Any] | None:
        return compiled("mla_preprocess_w8a8")

    def arguments(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """What the operator takes first. Quantizes the rows where the norm before has not."""
        down, up = self.down, self.up
        scale = None if self.norm is None else up.input_scale
        return (
            *down.quantize(hidden_states),
            down.weight,
            down.scale,
            down.bias,
            self.norm,
            self.norm_bias,
            None if scale is None else scale.scale,
            None if scale is None else scale.offset,
            up.weight,
            up.scale,
            up.bias,
        )


def projections_of(
    block: "NPUMultiHeadLatentAttention",
) -> FloatProjections | QuantizedProjections | None:
    """None when no compiled operator can do them.

    That is when a projection is more than a product, when they are of several kinds, and when a
    norm is not one of whole rows.
    """
    if not _covers_rows(block.kv_a_layernorm):  # whose bias attention adds to values
        return None
    if block.q_lora_rank is None:
        norm, layers = None, (block.kv_a_proj_with_mqa, block.q_proj)
    else:
        norm, layers = block.q_a_layernorm, (block.fused_qkv_a_proj, block.q_b_proj)
        if not _covers_rows(norm):
            return None
    return _float_projections(norm, *layers) or _quantized_projections(norm, *layers)


def _float_projections(norm: Any, down: Any, up: Any) -> FloatProjections | None:
    if norm is not None and not norm.is_plain:
        return None
    weights = plain_weight(down), plain_weight(up)
    if weights[0] is None or weights[1] is None:
        return None
    return FloatProjections(weights[0], None if norm is None else norm.weight, weights[1])


def _quantized_projections(norm: Any, down: Any, up: Any) -> QuantizedProjections | None:
    first, second = _quant_matmul(down), _quant_matmul(up)
    if first is None or second is None:
        return None
    if norm is None:  # both multiply the same rows
        is_uniform, weight, bias = first.quantizes_as(second), None, None
    else:
        is_uniform = (first.input_scale is None) == (second.input_scale is None)
        weight, bias = norm.weight, norm.loaded_bias
    return QuantizedProjections(first, weight, bias, second) if is_uniform else None


def _quant_matmul(layer: Any) -> QuantMatmul | None:
    method = getattr(layer, "quant_method", None)
    return method.quant_matmul if isinstance(method, QuantizedLinearMethodBase) else None


def _covers_rows(norm: Any) -> bool:
    return isinstance(norm, NPURMSNorm) and norm.covers_rows


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
    projections = projections_of(block)
    stage = None if projections is None else projections.operator
    if projections is None or stage is None:
        return None
    table = block.rotary_emb._match_cos_sin_cache_dtype(hidden_states)
    cos, sin = metadata.rotary_rows(table, positions)
    cache = block.mla_attn.bound_cache
    num_decode_tokens = metadata.num_decode_tokens
    absorbed, q_rope, q, latent, k_rope = stage(
        *projections.arguments(hidden_states),
        block.kv_a_layernorm.weight,
        block.mla_attn.impl.up_key,
        cos,
        sin,
        metadata.slot_mapping,
        cache.latent,
        cache.rotary,
        0.0 if projections.norm is None else block.q_a_layernorm.variance_epsilon,
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
