"""The stage before the attention of MLA."""

import torch
from torch import Tensor

from vllm_davinci.operators.kv_cache import scatter_rows
from vllm_davinci.operators.norm import rms_norm
from vllm_davinci.operators.products import product, quant_matmul
from vllm_davinci.operators.quantization import dynamic_quant, static_quant
from vllm_davinci.operators.rotary import rotated_pairs


def mla_preprocess(
    hidden_states: Tensor,
    a_weight: Tensor,
    q_a_norm: Tensor | None,
    q_b_weight: Tensor,
    kv_a_norm: Tensor,
    W_UK: Tensor,
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    kv_c_cache: Tensor,
    k_pe_cache: Tensor,
    q_epsilon: float,
    kv_epsilon: float,
    num_decode_tokens: int,
    side_stream: torch.Stream | None = None,
) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Query and key-value paths of MLA, up to attention.

    hidden_states: [num_tokens, hidden_size]; the first num_decode_tokens rows are decodes
    a_weight:      [hidden_size, q_lora_rank + kv_lora_rank + rope]: both down-projections, or
                   without q_a_norm [hidden_size, kv_lora_rank + rope]
    q_a_norm:      [q_lora_rank], or None if queries have no down-projection
    q_b_weight:    [q_lora_rank or hidden_size, num_heads * (nope + rope)]
    kv_a_norm:     [kv_lora_rank]
    W_UK:          [num_heads, nope, kv_lora_rank]
    cos, sin:      [num_tokens, 1, 1, rope], each value for both entries of a pair
    slot_mapping:  [num_tokens], int64; negative writes nothing
    kv_c_cache:    [num_blocks, block_size, 1, kv_lora_rank], written in place
    k_pe_cache:    [num_blocks, block_size, 1, rope], written in place
    side_stream:   stream of the key-value path and the rotation of queries; with it the
                   down-projections are two products
    Returns
      ql_nope:     [num_decode_tokens, num_heads, kv_lora_rank], queries times W_UK, or None
                   without decodes
      q_pe:        [num_tokens, num_heads, rope], rotated; pairs (2 i, 2 i + 1) become halves
      q:           [num_tokens, num_heads, nope + rope], not rotated, or None without prefills
      kv_c_normed: [num_tokens, kv_lora_rank], or None without prefills
      k_pe:        [num_tokens, rope], rotated, or None without prefills
    Source: DeepSeek-V2 technical report, section 2.1.
    """
    joint = product(hidden_states, a_weight)
    if q_a_norm is None:
        queries, kv = hidden_states, joint
    else:
        queries, kv = joint.tensor_split([q_a_norm.shape[0]], -1)
        queries = rms_norm(queries, q_a_norm, q_epsilon)
    q = product(queries, q_b_weight)
    cache = slot_mapping, kv_c_cache, k_pe_cache
    return _after_projections(
        q, kv, kv_a_norm, W_UK, cos, sin, *cache, kv_epsilon, num_decode_tokens
    )


def mla_preprocess_w8a8(
    hidden_states: Tensor,
    hidden_scale: Tensor | None,
    a_weight: Tensor,
    a_scale: Tensor,
    a_bias: Tensor | None,
    q_a_norm: Tensor | None,
    q_a_norm_bias: Tensor | None,
    q_input_scale: Tensor | None,
    q_input_offset: Tensor | None,
    q_b_weight: Tensor,
    q_b_scale: Tensor,
    q_b_bias: Tensor | None,
    kv_a_norm: Tensor,
    W_UK: Tensor,
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    kv_c_cache: Tensor,
    k_pe_cache: Tensor,
    q_epsilon: float,
    kv_epsilon: float,
    num_decode_tokens: int,
    side_stream: torch.Stream | None = None,
) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """`mla_preprocess` with quantized rows and int8 projections.

    A projection's result is (rows @ weight + bias) * scale, times the rows' scales if any, rounded
    once to W_UK's dtype.

    hidden_states:  [num_tokens, hidden_size] int8, from the norm before the block
    hidden_scale:   [num_tokens] fp32; None: rows have one scale, included in a_scale and q_b_scale
                    (W8A8), and compressed queries are quantized with q_input_scale
    a_weight:       int8, sizes as in mla_preprocess; NZ layout too
    a_scale:        one per column, fp32; without hidden_scale in an fp16 model, fp32 bits as int64
    a_bias:         [columns] int32 or None, the input offset's part of the sums
    q_a_norm_bias:  [q_lora_rank] or None, added to the rounded norm
    q_input_scale:  [1] fp32, q_input_offset: [1] int32: integer = round(value / scale + offset).
                    Both None with hidden_scale, which gives each compressed query a scale, and
                    without q_a_norm
    q_b_weight, q_b_scale, q_b_bias: as those of a
    Results and the other arguments are those of mla_preprocess; with side_stream and a weight in
    the NZ layout the down projections stay one product.
    """
    dtype = W_UK.dtype
    joint = quant_matmul(hidden_states, hidden_scale, a_weight, a_scale, a_bias, dtype)
    queries, query_scale, kv = hidden_states, hidden_scale, joint
    if q_a_norm is not None:
        compressed, kv = joint.tensor_split([q_a_norm.shape[0]], -1)
        normed = rms_norm(compressed, q_a_norm, q_epsilon)
        normed = normed if q_a_norm_bias is None else normed + q_a_norm_bias
        queries, query_scale = _quantized_queries(normed, q_input_scale, q_input_offset)
    q = quant_matmul(queries, query_scale, q_b_weight, q_b_scale, q_b_bias, dtype)
    cache = slot_mapping, kv_c_cache, k_pe_cache
    return _after_projections(
        q, kv, kv_a_norm, W_UK, cos, sin, *cache, kv_epsilon, num_decode_tokens
    )


def _quantized_queries(
    normed: Tensor, scale: Tensor | None, offset: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Compressed queries in int8, and their scales; None if one scale serves all.

    normed: [num_tokens, q_lora_rank]
    scale, offset: [1], or None if each query gets a dynamic scale
    """
    if scale is None or offset is None:
        return dynamic_quant(normed)
    return static_quant(normed, scale, offset), None


def _after_projections(
    q: Tensor,
    kv: Tensor,
    kv_a_norm: Tensor,
    W_UK: Tensor,
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    kv_c_cache: Tensor,
    k_pe_cache: Tensor,
    kv_epsilon: float,
    num_decode_tokens: int,
) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Key-value norm, rotations, cache write and absorption; the results of `mla_preprocess`.

    q:  [num_tokens, num_heads * (nope + rope)]
    kv: [num_tokens, kv_lora_rank + rope]
    """
    num_heads, nope, rank = W_UK.shape
    num_tokens, rope = q.shape[0], k_pe_cache.shape[-1]
    q = q.view(num_tokens, num_heads, nope + rope)
    kv_c_normed = rms_norm(kv[:, :rank], kv_a_norm, kv_epsilon)
    k_pe = rotated_pairs(kv[:, rank:], cos.view(num_tokens, rope), sin.view(num_tokens, rope))
    q_pe = rotated_pairs(
        q[..., nope:], cos.view(num_tokens, 1, rope), sin.view(num_tokens, 1, rope)
    )
    scatter_rows(kv_c_cache, slot_mapping, kv_c_normed.unsqueeze(1))
    scatter_rows(k_pe_cache, slot_mapping, k_pe.unsqueeze(1))
    ql_nope = None
    if num_decode_tokens:
        q_nope = q[:num_decode_tokens, :, :nope]
        ql_nope = torch.einsum("thp,hpl->thl", q_nope.float(), W_UK.float()).to(q.dtype)
    if num_decode_tokens == num_tokens:
        return ql_nope, q_pe, None, None, None
    return ql_nope, q_pe, q, kv_c_normed, k_pe
