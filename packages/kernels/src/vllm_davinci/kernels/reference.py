"""Definition of every operator in plain torch: same names, arguments and results.

They run on any device. Norms, softmax and products accumulate in fp32; results are rounded once to
the dtype of the output. The tests and the meta functions are held against these.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Root-mean-square normalization over the last dimension.

    x:      [..., hidden_size]
    weight: [hidden_size]
    Source: Zhang and Sennrich 2019, eq. 4.
    """
    return _normalized(x, weight, epsilon).to(x.dtype)


def _normalized(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * weight.float()


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Norm of x + residual, and that sum, both [..., hidden_size]."""
    total = (x.float() + residual.float()).to(x.dtype)
    return rms_norm(total, weight, epsilon), total


def add_rms_norm_dynamic_quant(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of x + residual with a scale per row, and that sum.

    Returns int8 [..., hidden_size], fp32 scales [...] and the sum in x's dtype.
    """
    normalized, total = add_rms_norm(x, residual, weight, epsilon)
    integers, scales = dynamic_quant(normalized)
    return integers, scales, total


def add_rms_norm_quant(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor,
    offset: Tensor,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, plus bias, with a given scale, and that sum.

    bias:   [hidden_size] or None
    scale:  [1] fp32, offset: [1] int32: integer = round(value / scale + offset)
    Returns int8 [..., hidden_size] and the sum in x's dtype.
    """
    normalized, total = add_rms_norm(x, residual, weight, epsilon)
    if bias is not None:
        normalized = normalized + bias
    return static_quant(normalized, scale, offset), total


def static_quant(x: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """Rows as integers with one scale and offset: x is about (integers - offset) * scale."""
    return to_int8(x.float() / scale + offset)


def to_int8(x: Tensor) -> Tensor:
    """The nearest integers, halves to even, within int8's range. NaN becomes 0."""
    return torch.nan_to_num(torch.round(x)).clamp(-128, 127).to(torch.int8)


def dynamic_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as integers with one scale each: x is about integers * scale."""
    wide = x.float()
    scales = wide.abs().amax(-1) / 127
    steps = torch.where(scales == 0, 1, scales).unsqueeze(-1)
    return to_int8(wide / steps), scales


def dynamic_quant_in_launch(x: Tensor) -> tuple[Tensor, Tensor]:
    """Like dynamic_quant, as fused operators round: values are multiplied by 127 / max|x|."""
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True)
    # A tensor divided by a tensor: torch takes a number divided by one for its reciprocal times it.
    return to_int8(wide * (torch.full_like(largest, 127) / largest)), (largest / 127).squeeze(-1)


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    is_neox_style: bool,
) -> tuple[Tensor, Tensor]:
    """Rotates the first rotary_dim entries of every head by its token's position.

    positions:     [num_tokens], int64
    query:         [num_tokens, num_heads * head_size]
    key:           [num_tokens, num_kv_heads * head_size]
    cos_sin_cache: [max_position, rotary_dim], cosines, then sines
    is_neox_style: pairs are (i, i + rotary_dim / 2), otherwise (2 i, 2 i + 1)
    Returns new tensors. Source: Su et al. 2021, eq. 34.
    """
    cos, sin = cos_sin_cache[positions].float().unsqueeze(1).chunk(2, dim=-1)
    rotary_dim = cos_sin_cache.shape[1]

    def rotated(rows: Tensor) -> Tensor:
        heads = rows.view(rows.shape[0], -1, head_size)
        turning, rest = heads[..., :rotary_dim].float(), heads[..., rotary_dim:]
        if is_neox_style:
            first, second = turning.chunk(2, dim=-1)
        else:
            first, second = turning[..., ::2], turning[..., 1::2]
        pair = (first * cos - second * sin, second * cos + first * sin)
        turned = torch.cat(pair, -1) if is_neox_style else torch.stack(pair, -1).flatten(-2)
        return torch.cat([turned.to(rows.dtype), rest], -1).view_as(rows)

    return rotated(query), rotated(key)


def vocab_parallel_embedding(
    token_ids: Tensor, weight: Tensor, first_row: int, num_rows: int
) -> Tensor:
    """Vocabulary mask and look-up: a rank's part of the embedding, zeros for foreign tokens.

    token_ids: [num_tokens], int32 or int64
    weight:    [at least num_rows, embedding_dim], the share
    Returns [num_tokens, embedding_dim]; the sum over ranks is the embedding.
    """
    rows = token_ids.long() - first_row
    is_foreign = (rows < 0) | (rows >= num_rows)
    return weight[rows.masked_fill(is_foreign, 0)].masked_fill(is_foreign.unsqueeze(-1), 0)


def copy_kv_blocks(kv_caches: list[Tensor], block_pairs: Tensor) -> None:
    """Copies blocks inside every cache, one pair after the other.

    kv_caches:   each [num_blocks, ...], contiguous; written in place
    block_pairs: [num_pairs, 2], int64, on the host: from, to
    """
    for cache in kv_caches:
        for source, target in block_pairs.tolist():
            cache[target] = cache[source]


def paged_attention(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor | None,
    block_table: Tensor,
    actual_seq_lengths_q: list[int],
    seq_lens: list[int],
    mask: Tensor | None,
    scale: float,
    sparse_mode: int,
    pre_tokens: int,
    next_tokens: int,
    out: Tensor,
) -> None:
    """Writes a step's keys and values to the cache, then attends over the cache.

    query:        [num_tokens, num_heads, head_size]
    key, value:   [num_tokens, num_kv_heads, head_size], or None when they are in the cache
    caches:       [num_blocks, block_size, num_kv_heads, head_size], contiguous, written in place
    slot_mapping: [num_tokens], block * block_size + offset; negative writes nothing
    block_table:  [num_reqs, max_blocks], int32
    actual_seq_lengths_q: cumulative query lengths; seq_lens: all tokens of each request
    mask:         [2048, 2048] bool or int8 with ones above the diagonal, in modes 3 and 4
    sparse_mode:  0 every key, 3 causal from the last query back, 4 the band from pre_tokens
                  before a query to next_tokens after it
    out:          like query, written in place
    """
    if key is not None and value is not None and slot_mapping is not None:
        slots = slot_mapping.long()
        written = slots >= 0
        for cache, rows in ((key_cache, key), (value_cache, value)):
            cache.view(-1, *cache.shape[2:])[slots[written]] = rows[written].to(cache.dtype)
    begin = 0
    for blocks, end, length in zip(block_table.long(), actual_seq_lengths_q, seq_lens, strict=True):
        keys, values = (cache[blocks].flatten(0, 1)[:length] for cache in (key_cache, value_cache))
        visible = _visible(end - begin, length, sparse_mode, pre_tokens, next_tokens, out.device)
        out[begin:end] = _attend(query[begin:end], keys, values, visible, scale)[0].to(out.dtype)
        begin = end


def prefill_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    actual_seq_lengths_q: list[int],
    actual_seq_lengths_kv: list[int],
    mask: Tensor | None,
    scale: float,
    sparse_mode: int,
    pre_tokens: int,
    next_tokens: int,
    returns_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Attends over keys and values that are given, request by request.

    query:      [num_queries, num_heads, head_size]
    key, value: [num_keys, num_kv_heads, head_size]
    query_rope, key_rope: further entries of each head, beside those of query and key, or None
    actual_seq_lengths_q, actual_seq_lengths_kv: cumulative lengths
    The other arguments are those of paged_attention.
    Returns [num_queries, num_heads, head_size of value] and the logarithm of the sum of
    exponentials, fp32 [num_queries, num_heads, 1], or None.
    """
    if query_rope is not None and key_rope is not None:
        query, key = torch.cat([query, query_rope], -1), torch.cat([key, key_rope], -1)
    results = []
    begin, key_begin = 0, 0
    for end, key_end in zip(actual_seq_lengths_q, actual_seq_lengths_kv, strict=True):
        visible = _visible(
            end - begin, key_end - key_begin, sparse_mode, pre_tokens, next_tokens, query.device
        )
        rows = slice(key_begin, key_end)
        results.append(_attend(query[begin:end], key[rows], value[rows], visible, scale))
        begin, key_begin = end, key_end
    out = torch.cat([rows for rows, _ in results]).to(query.dtype)
    return out, torch.cat([lse for _, lse in results]) if returns_lse else None


def _visible(
    num_queries: int,
    num_keys: int,
    sparse_mode: int,
    pre_tokens: int,
    next_tokens: int,
    device: torch.device,
) -> Tensor:
    """[num_queries, num_keys]: which keys a query sees; the last query is at the last key."""
    position = torch.arange(num_queries, device=device).unsqueeze(1) + num_keys - num_queries
    distance = torch.arange(num_keys, device=device) - position
    if sparse_mode == 0:
        return torch.ones_like(distance, dtype=torch.bool)
    if sparse_mode == 3:
        return distance <= 0
    return (distance >= -pre_tokens) & (distance <= next_tokens)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """One request: [queries, heads, value size] and [queries, heads, 1], both fp32."""
    repeats = query.shape[1] // key.shape[1]
    keys, values = (t.float().repeat_interleave(repeats, dim=1) for t in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * scale
    scores = scores.masked_fill(~visible, -torch.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return out, scores.logsumexp(-1).transpose(0, 1).unsqueeze(-1)


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
    """Query and key-value paths of MLA, up to attention itself.

    hidden_states: [num_tokens, hidden_size]; the first num_decode_tokens rows are decodes
    a_weight:      [hidden_size, q_lora_rank + kv_lora_rank + rope]: both down projections, or
                   without q_a_norm [hidden_size, kv_lora_rank + rope]
    q_a_norm:      [q_lora_rank], or None when queries have no down projection
    q_b_weight:    [q_lora_rank or hidden_size, num_heads * (nope + rope)]
    kv_a_norm:     [kv_lora_rank]
    W_UK:          [num_heads, nope, kv_lora_rank]
    cos, sin:      [num_tokens, 1, 1, rope], each value for both entries of a pair
    slot_mapping:  [num_tokens], int64; negative writes nothing
    kv_c_cache:    [num_blocks, block_size, 1, kv_lora_rank], written in place
    k_pe_cache:    [num_blocks, block_size, 1, rope], written in place
    side_stream:   where the key-value path and the rotation of queries run, beside the rest; the
                   down projections are two products then
    Returns
      ql_nope:     [num_decode_tokens, num_heads, kv_lora_rank], queries times W_UK, or None
                   without decodes
      q_pe:        [num_tokens, num_heads, rope], rotated; pairs (2 i, 2 i + 1) end as halves
      q:           [num_tokens, num_heads, nope + rope], not rotated, or None without prefills
      kv_c_normed: [num_tokens, kv_lora_rank], or None without prefills
      k_pe:        [num_tokens, rope], rotated, or None without prefills
    Source: DeepSeek-V2 technical report, section 2.1.
    """
    joint = _product(hidden_states, a_weight)
    if q_a_norm is None:
        queries, kv = hidden_states, joint
    else:
        queries, kv = joint.tensor_split([q_a_norm.shape[0]], -1)
        queries = rms_norm(queries, q_a_norm, q_epsilon)
    return _after_projections(
        _product(queries, q_b_weight),
        kv,
        kv_a_norm,
        W_UK,
        cos,
        sin,
        slot_mapping,
        kv_c_cache,
        k_pe_cache,
        kv_epsilon,
        num_decode_tokens,
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
    """`mla_preprocess` of quantized rows, with int8 projections.

    A projection's result is (rows @ weight + bias) * scale, times the rows' scales where they have
    some, rounded once to W_UK's dtype.

    hidden_states:  [num_tokens, hidden_size] int8, as the norm before the block gives them
    hidden_scale:   [num_tokens] fp32; or None: rows have one scale, which is in a_scale and
                    q_b_scale (W8A8), and compressed queries are quantized with q_input_scale
    a_weight:       int8, sizes as in mla_preprocess; also in the NZ layout
    a_scale:        one per column; fp32, or without hidden_scale in an fp16 model the bits of fp32
                    values as int64
    a_bias:         [columns] int32 or None, what an input offset adds to the sums
    q_a_norm_bias:  [q_lora_rank] or None, added to the rounded norm
    q_input_scale:  [1] fp32, q_input_offset: [1] int32: integer = round(value / scale + offset).
                    None both with hidden_scale, where every compressed query has a scale of its
                    own, and without q_a_norm
    q_b_weight, q_b_scale, q_b_bias: as those of a
    Results and the other arguments are those of mla_preprocess; with side_stream and a weight in
    the NZ layout the down projections stay one product.
    """
    dtype = W_UK.dtype
    joint = _quant_matmul(hidden_states, hidden_scale, a_weight, a_scale, a_bias, dtype)
    queries, query_scale, kv = hidden_states, hidden_scale, joint
    if q_a_norm is not None:
        compressed, kv = joint.tensor_split([q_a_norm.shape[0]], -1)
        normed = rms_norm(compressed, q_a_norm, q_epsilon)
        if q_a_norm_bias is not None:
            normed = normed + q_a_norm_bias
        if q_input_scale is None or q_input_offset is None:
            queries, query_scale = dynamic_quant(normed)
        else:
            queries = static_quant(normed, q_input_scale, q_input_offset)
    return _after_projections(
        _quant_matmul(queries, query_scale, q_b_weight, q_b_scale, q_b_bias, dtype),
        kv,
        kv_a_norm,
        W_UK,
        cos,
        sin,
        slot_mapping,
        kv_c_cache,
        k_pe_cache,
        kv_epsilon,
        num_decode_tokens,
    )


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
    """Key-value norm, rotations, cache write and absorption: results of `mla_preprocess`.

    q:  [num_tokens, num_heads * (nope + rope)]
    kv: [num_tokens, kv_lora_rank + rope]
    """
    num_heads, nope, rank = W_UK.shape
    num_tokens, rope = q.shape[0], k_pe_cache.shape[-1]
    q = q.view(num_tokens, num_heads, nope + rope)
    kv_c_normed = rms_norm(kv[:, :rank], kv_a_norm, kv_epsilon)
    k_pe = _rotated_pairs(kv[:, rank:], cos.view(num_tokens, rope), sin.view(num_tokens, rope))
    q_pe = _rotated_pairs(
        q[..., nope:], cos.view(num_tokens, 1, rope), sin.view(num_tokens, 1, rope)
    )
    slots = slot_mapping.long()
    written = slots >= 0
    kv_c_cache.view(-1, rank)[slots[written]] = kv_c_normed[written]
    k_pe_cache.view(-1, rope)[slots[written]] = k_pe[written]
    ql_nope = None
    if num_decode_tokens:
        q_nope = q[:num_decode_tokens, :, :nope]
        ql_nope = torch.einsum("thp,hpl->thl", q_nope.float(), W_UK.float()).to(q.dtype)
    if num_decode_tokens == num_tokens:
        return ql_nope, q_pe, None, None, None
    return ql_nope, q_pe, q, kv_c_normed, k_pe


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return (x.float() @ weight.float()).to(x.dtype)


def _quant_matmul(
    rows: Tensor,
    row_scale: Tensor | None,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    sums = (rows.long() @ weight.long()).to(torch.int32)  # exact
    if bias is not None:
        sums = sums + bias
    values = sums.float() * _float_scales(scale)
    if row_scale is not None:
        values = values * row_scale.unsqueeze(-1)
    return values.to(dtype)


def _float_scales(scale: Tensor) -> Tensor:
    """fp32; int64 holds their bits, which are less than 2**31: scales are positive."""
    return scale.to(torch.int32).view(torch.float32) if scale.dtype == torch.int64 else scale


def _rotated_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Entries (2 i, 2 i + 1) rotated together; the results lie at i and i + size / 2."""
    even, odd = x[..., ::2].float(), x[..., 1::2].float()
    turned = torch.cat([even, odd], -1) * cos.float() + torch.cat([-odd, even], -1) * sin.float()
    return turned.to(x.dtype)


def mla_decode_attention(
    ql_nope: Tensor,
    q_pe: Tensor,
    kv_c_cache: Tensor,
    k_pe_cache: Tensor,
    block_table: Tensor,
    actual_seq_lengths_q: list[int],
    seq_lens: list[int],
    mask: Tensor | None,
    W_UV: Tensor,
    scale: float,
) -> Tensor:
    """MLA of decodes over the cache itself, and the values' up projection.

    ql_nope:   [num_tokens, num_heads, kv_lora_rank], as mla_preprocess gives them
    q_pe:      [num_tokens, num_heads, rope]
    caches:    as in mla_preprocess; they hold this step's tokens
    mask:      as in paged_attention, when a request has several queries; they are causal then
    W_UV:      [num_heads, kv_lora_rank, v_head_dim]
    Returns [num_tokens, num_heads * v_head_dim].
    """
    query = torch.cat([ql_nope, q_pe], -1)
    out = torch.empty_like(ql_nope, dtype=torch.float32)
    begin = 0
    for blocks, end, length in zip(block_table.long(), actual_seq_lengths_q, seq_lens, strict=True):
        kv_c, k_pe = (cache[blocks].flatten(0, 1)[:length] for cache in (kv_c_cache, k_pe_cache))
        visible = _visible(end - begin, length, 0 if mask is None else 3, 0, 0, out.device)
        key = torch.cat([kv_c, k_pe], -1)
        out[begin:end] = _attend(query[begin:end], key, kv_c, visible, scale)[0]
        begin = end
    rounded = out.to(ql_nope.dtype).float()
    return torch.einsum("thl,hlv->thv", rounded, W_UV.float()).to(ql_nope.dtype).flatten(1)


def experts(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    first_expert: int,
    num_experts: int,
) -> Tensor:
    """The weighted sum of every token's experts that are on this rank.

    x:            [num_tokens, hidden_size]
    topk_weights: [num_tokens, top_k]
    topk_ids:     [num_tokens, top_k], int32, numbers over all ranks
    gate_up:      [num_local, hidden_size, 2 * intermediate_size], gate before up
    down:         [num_local, intermediate_size, hidden_size]
    first_expert: this rank has the experts [first_expert, first_expert + num_local) of num_experts
    Returns a tensor like x: zeros for a token without experts here.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for local in range(gate_up.shape[0]):
        token, choice = (topk_ids == first_expert + local).nonzero(as_tuple=True)
        gate, up = _product(x[token], gate_up[local]).float().chunk(2, dim=-1)
        hidden = (torch.nn.functional.silu(gate) * up).to(x.dtype)
        weights = topk_weights[token, choice].float().unsqueeze(-1)
        out.index_add_(0, token, _product(hidden, down[local]).float() * weights)
    return out.to(x.dtype)


def experts_w8a8(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    first_expert: int,
    num_experts: int,
) -> Tensor:
    """`experts` with int8 weights; rows are quantized with scales of their own.

    gate_up, down: as in `experts`, int8
    gate_up_scale: [num_local, 2 * intermediate_size], fp32
    down_scale:    [num_local, hidden_size], fp32, or bf16 for a bf16 x
    Sums of products are exact integers; a row is quantized before each of the two products.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for local in range(gate_up.shape[0]):
        token, choice = (topk_ids == first_expert + local).nonzero(as_tuple=True)
        rows, scales = dynamic_quant(x[token])
        sums = rows.double() @ gate_up[local].double()
        gate, up = (sums.float() * gate_up_scale[local] * scales.unsqueeze(-1)).chunk(2, dim=-1)
        rows, scales = dynamic_quant(torch.nn.functional.silu(gate) * up)
        sums = rows.double() @ down[local].double()
        result = sums.float() * down_scale[local].float() * scales.unsqueeze(-1)
        weights = topk_weights[token, choice].float().unsqueeze(-1)
        out.index_add_(0, token, result.to(x.dtype).float() * weights)
    return out.to(x.dtype)


def routed_experts(
    x: Tensor,
    router_logits: Tensor,
    correction_bias: Tensor | None,
    gate_up: Tensor,
    down: Tensor,
    top_k: int,
    num_groups: int,
    num_chosen_groups: int,
    is_sigmoid: bool,
    scaling_factor: float,
    first_expert: int,
    num_experts: int,
) -> Tensor:
    """Chooses each token's experts, then computes `experts`.

    router_logits:   [num_tokens, num_experts], fp32 or 16 bits
    correction_bias: [num_experts], added to the scores for the choice only, or None; logits of
                     another dtype are converted to its dtype
    num_groups, num_chosen_groups: experts come from the best groups; a group's score is the sum
                     of its two best with a correction bias and its best without; 1, 1 for no groups
    is_sigmoid:      scores are sigmoids and the chosen ones are scaled to sum to one; otherwise a
                     softmax, whose chosen ones sum to one only without groups, bias and factor
    scaling_factor:  multiplies the weights
    Source: DeepSeek-V3 technical report, section 2.1.2.
    """
    topk_weights, topk_ids = _choose(
        router_logits,
        correction_bias,
        top_k,
        num_groups,
        num_chosen_groups,
        is_sigmoid,
        scaling_factor,
    )
    return experts(x, topk_weights.to(x.dtype), topk_ids, gate_up, down, first_expert, num_experts)


def routed_experts_w8a8(
    x: Tensor,
    router_logits: Tensor,
    correction_bias: Tensor | None,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    top_k: int,
    num_groups: int,
    num_chosen_groups: int,
    is_sigmoid: bool,
    scaling_factor: float,
    first_expert: int,
    num_experts: int,
) -> Tensor:
    """Chooses each token's experts as `routed_experts` does, then computes `experts_w8a8`."""
    topk_weights, topk_ids = _choose(
        router_logits,
        correction_bias,
        top_k,
        num_groups,
        num_chosen_groups,
        is_sigmoid,
        scaling_factor,
    )
    return experts_w8a8(
        x,
        topk_weights.to(x.dtype),
        topk_ids,
        gate_up,
        gate_up_scale,
        down,
        down_scale,
        first_expert,
        num_experts,
    )


def _choose(
    router_logits: Tensor,
    correction_bias: Tensor | None,
    top_k: int,
    num_groups: int,
    num_chosen_groups: int,
    is_sigmoid: bool,
    scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    """Weights, fp32, and int32 ids, [num_tokens, top_k] both."""
    logits = router_logits.float()
    scores = logits.sigmoid() if is_sigmoid else logits.softmax(-1)
    choice = scores if correction_bias is None else scores + correction_bias.float()
    groups = choice.view(choice.shape[0], num_groups, -1)
    best = groups.amax(-1) if correction_bias is None else groups.topk(2, dim=-1).values.sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool)
    kept.scatter_(1, best.topk(num_chosen_groups, dim=-1).indices, True)
    choice = groups.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)
    topk_ids = choice.topk(top_k, dim=-1).indices
    weights = scores.gather(1, topk_ids)
    is_plain = num_groups == 1 and correction_bias is None and scaling_factor == 1.0
    if is_sigmoid or is_plain:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * scaling_factor, topk_ids.to(torch.int32)


def block_fp8_floats(
    weight: Tensor,
    scale: Tensor,
    block_rows: int,
    block_columns: int,
    dtype: torch.dtype,
    spares: Sequence[Tensor],
) -> Tensor:
    """The values of an fp8 weight with a scale per block, each rounded once to `dtype`.

    weight: [out, in] float8_e4m3fn, contiguous, in host memory
    scale:  [ceil(out / block_rows), ceil(in / block_columns)] fp32
    dtype:  bfloat16 or float32
    spares: in host memory; the result may take the memory of one that no other tensor has
    """
    wide = scale.repeat_interleave(block_rows, 0)[: weight.shape[0]]
    wide = wide.repeat_interleave(block_columns, 1)[:, : weight.shape[1]]
    return (weight.float() * wide).to(dtype)


def block_fp8_integers(
    weight: Tensor,
    scale: Tensor,
    block_rows: int,
    block_columns: int,
    spares: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """The same values rounded to int8 [out, in], and the scale of each row, fp32 [out, 1].

    weight, scale, spares: as for block_fp8_floats
    """
    values = block_fp8_floats(weight, scale, block_rows, block_columns, torch.float32, spares)
    row_scale = values.abs().amax(1, keepdim=True) / 127
    row_scale = torch.where(row_scale == 0, torch.ones_like(row_scale), row_scale)
    return (values / row_scale).round().clamp(-128, 127).to(torch.int8), row_scale
