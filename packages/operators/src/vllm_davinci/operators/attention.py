"""Attention over blocks of the KV cache."""

import torch
from torch import Tensor

from vllm_davinci.operators.kv_cache import scatter_rows


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
    key, value:   [num_tokens, num_kv_heads, head_size], or None if they are in the cache
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
        scatter_rows(key_cache, slot_mapping, key)
        scatter_rows(value_cache, slot_mapping, value)
    begin = 0
    for blocks, end, length in zip(block_table, actual_seq_lengths_q, seq_lens, strict=True):
        keys, values = (rows_of(cache, blocks, length) for cache in (key_cache, value_cache))
        band = pre_tokens, next_tokens
        visible = visible_keys(end - begin, length, sparse_mode or 1, *band, out.device)
        out[begin:end] = attend(query[begin:end], keys, values, scale, visible)[0].to(out.dtype)
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
    """Attends over the given keys and values, request by request.

    query:      [num_queries, num_heads, head_size]
    key, value: [num_keys, num_kv_heads, head_size]
    query_rope, key_rope: further entries of each head of query and key, or None
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
        sizes, band = (end - begin, key_end - key_begin), (pre_tokens, next_tokens)
        visible = visible_keys(*sizes, sparse_mode or 1, *band, query.device)
        rows = slice(key_begin, key_end)
        results.append(attend(query[begin:end], key[rows], value[rows], scale, visible))
        begin, key_begin = end, key_end
    out = torch.cat([rows for rows, _ in results]).to(query.dtype)
    return out, torch.cat([lse for _, lse in results]) if returns_lse else None


def visible_keys(
    num_queries: int,
    num_keys: int,
    sparse_mode: int,
    pre_tokens: int = 2**31,
    next_tokens: int = 2**31,
    device: torch.device | None = None,
) -> Tensor:
    """[num_queries, num_keys], bool: the keys that CANN's sparse mode shows to each query.

    Mode 0 shows the band from pre_tokens before a query to next_tokens after it, 1 every key, 2 the
    keys up to the query's own number. Modes 3 (causal) and 4 (the band) put the last query at the
    last key.
    """
    shift = num_keys - num_queries if sparse_mode in (3, 4) else 0
    query = torch.arange(num_queries, device=device).unsqueeze(1) + shift
    distance = torch.arange(num_keys, device=device) - query
    if sparse_mode == 1:
        return torch.ones_like(distance, dtype=torch.bool)
    if sparse_mode in (2, 3):
        return distance <= 0
    return (distance >= -pre_tokens) & (distance <= next_tokens)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    visible: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of one request, computed and returned in `dtype`.

    query:      [queries, heads, size]
    key, value: [keys, key heads, size]
    visible:    [queries, keys], bool; None: all keys
    bias:       [heads, queries, keys], added to the scaled scores
    sink:       [heads], a further score per head in the softmax, without a value
    Returns [queries, heads, value size] and the logarithm of the sum of exponentials
    [queries, heads, 1]. A query that sees no key gets zeros, and infinity.
    Source: Vaswani et al. 2017, eq. 1.
    """
    repeats = query.shape[1] // key.shape[1]
    keys, values = (t.to(dtype).repeat_interleave(repeats, dim=1) for t in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.to(dtype), keys) * scale
    if bias is not None:
        scores = scores + bias.to(dtype)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    if sink is not None:
        lse = torch.logaddexp(lse, sink.to(dtype)[:, None, None])
    out = torch.einsum("hqk,khd->qhd", (scores - lse).exp().nan_to_num(0), values)
    sees_nothing = (scores == -torch.inf).all(-1, keepdim=True)
    return out, lse.masked_fill(sees_nothing, torch.inf).transpose(0, 1)


def rows_of(cache: Tensor, blocks: Tensor, length: int) -> Tensor:
    """A request's rows [length, heads, size] of a cache [num_blocks, block_size, heads, size]."""
    return cache[blocks.long()].flatten(0, 1)[:length]


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
    """MLA of decodes over the compressed cache, and the values' up-projection.

    ql_nope:   [num_tokens, num_heads, kv_lora_rank], from mla_preprocess
    q_pe:      [num_tokens, num_heads, rope]
    caches:    as in mla_preprocess; they hold this step's tokens
    mask:      as in paged_attention if a request has several queries, which are causal
    W_UV:      [num_heads, kv_lora_rank, v_head_dim]
    Returns [num_tokens, num_heads * v_head_dim].
    """
    query = torch.cat([ql_nope, q_pe], -1)
    out = torch.empty_like(ql_nope, dtype=torch.float32)
    begin = 0
    for blocks, end, length in zip(block_table, actual_seq_lengths_q, seq_lens, strict=True):
        kv_c, k_pe = (rows_of(cache, blocks, length) for cache in (kv_c_cache, k_pe_cache))
        visible = None if mask is None else visible_keys(end - begin, length, 3, device=out.device)
        key = torch.cat([kv_c, k_pe], -1)
        out[begin:end] = attend(query[begin:end], key, kv_c, scale, visible)[0]
        begin = end
    rounded = out.to(ql_nope.dtype).float()
    return torch.einsum("thl,hlv->thv", rounded, W_UV.float()).to(ql_nope.dtype).flatten(1)
