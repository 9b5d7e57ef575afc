"""Attention over blocks of the KV cache."""

from __future__ import annotations

import torch
from torch import Tensor


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
    """Mask [num_queries, num_keys]: the keys that a query sees; the last one is at the last key."""
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
