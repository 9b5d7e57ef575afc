"""Temperature, noise and limits of sampling, with torch operators.

Stand-ins for kernels of vLLM's V2 runner (v1/worker/gpu/sample), with the same parameters without
`_ptr`. Nothing here reads from the device. Shapes: L rows of logits, V entries of the vocabulary, R
slots of requests.

logits:               [L, V], any float, changed in place
expanded_idx_mapping: [L] int64, the slot of each row's request
"""

from functools import cache
from typing import Any

import torch

# Constants of the hash: 32-bit words in int64, whose products below do not overflow.
WORD = 0xFFFFFFFF
SECOND_DOMAIN = 0x9E3779B9  # domain of the other 32 bits of a 53-bit draw
# Added to positions of drafts, so that their noise differs from their target's.
DRAFT_POSITIONS = 1 << 30
SMALLEST = 5.960464477539063e-08  # 2 ** -24


def temperature(
    logits: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    vocab_size: int,
    **_: Any,
) -> None:
    """Divides rows by their request's temperature [R] fp32; 0 and 1 leave rows unchanged."""
    of_row = temperature.index_select(0, expanded_idx_mapping)
    of_row = of_row.masked_fill(of_row == 0, 1.0).unsqueeze(1)
    logits.copy_(logits.to(torch.float32) / of_row)


def min_p(
    logits: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping: torch.Tensor,
    min_p: torch.Tensor,
    vocab_size: int,
    **_: Any,
) -> None:
    """Excludes tokens less likely than `min_p` [R] fp32 times the most likely one."""
    of_row = min_p.index_select(0, expanded_idx_mapping).unsqueeze(1)
    threshold = logits.amax(dim=1, keepdim=True).to(torch.float32) + of_row.log_()
    # The threshold for min_p 0 is -inf, which excludes nothing.
    logits.masked_fill_(logits < threshold, -torch.inf)


def gumbel_sample(
    local_argmax: torch.Tensor,
    local_argmax_stride: int,
    local_max: torch.Tensor,
    local_max_stride: int,
    logits_cache: torch.Tensor | None,
    logits_cache_stride_0: int,
    logits_cache_stride_1: int,
    logits_cache_col: torch.Tensor | None,
    logits_cache_source: torch.Tensor | None,
    logits_cache_source_stride: int,
    logits: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping: torch.Tensor,
    seeds: torch.Tensor,
    pos: torch.Tensor,
    temp: torch.Tensor,
    vocab_size: int,
    IS_DRAFTING: bool = False,
    APPLY_TEMPERATURE: bool = True,
    USE_FP64: bool = False,
    PER_TOKEN_COL: bool = False,
    **_: Any,
) -> None:
    """Draws a token for each row: the greatest logit, with noise if the temperature is not 0.

    local_argmax: [L, n] int64, and local_max: [L, n] fp32 or fp64, written: vLLM uses the argmax
                  of the column with the greatest maximum. Here that is the first column
    logits_cache: [R, columns, V], stores the logits of `logits_cache_source` [L, V] before the
                  temperature, at the row's slot and column `logits_cache_col`: one for all rows, or
                  with PER_TOKEN_COL [L]. A row with slot -1 stores none
    seeds:        [R] int64; pos: [L] int64; temp: [R] fp32
    """
    slot = expanded_idx_mapping.clamp(min=0)
    if logits_cache is not None:
        assert logits_cache_col is not None and logits_cache_source is not None
        column = logits_cache_col if PER_TOKEN_COL else logits_cache_col.expand(slot.shape[0])
        _keep(logits_cache, expanded_idx_mapping, column, logits_cache_source[:, :vocab_size])
    of_row = temp.index_select(0, slot).masked_fill(expanded_idx_mapping < 0, 0.0).unsqueeze(1)
    values = logits.to(torch.float32)
    if APPLY_TEMPERATURE:
        values = values / of_row.masked_fill(of_row == 0, 1.0)
    if USE_FP64:
        values = values.to(torch.float64)
    position = pos + DRAFT_POSITIONS if IS_DRAFTING else pos
    noise = gumbel_noise(seeds.index_select(0, slot), position, vocab_size, USE_FP64)
    values = torch.where(of_row == 0, values, values + noise)
    token = values.argmax(dim=1, keepdim=True)
    local_argmax[:, :1].copy_(token)
    local_max.fill_(-torch.inf)
    local_max[:, :1].zero_()


def _keep(
    cache: torch.Tensor, slots: torch.Tensor, column: torch.Tensor, logits: torch.Tensor
) -> None:
    """Writes logits [L, V] to [slot, column] of a cache; rows with slot -1 write nothing."""
    num_columns = cache.shape[1]
    rows = cache.view(-1, cache.shape[2])
    places = slots.clamp(min=0) * num_columns + column.to(torch.int64)
    kept = rows.index_select(0, places)
    kept[:, : logits.shape[1]] = torch.where(
        (slots >= 0).unsqueeze(1), logits, kept[:, : logits.shape[1]]
    )
    rows.index_copy_(0, places, kept)


def gumbel_noise(
    seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int, is_double: bool = False
) -> torch.Tensor:
    """Noise from a request's seed, a position and a token: [L, V] fp32, or fp64.

    seeds, positions: [L] int64
    Source: vLLM's v1/worker/gpu/sample/gumbel.py.
    """
    hashed = token_hashes(seeds, positions, vocab_size)
    if is_double:
        high = token_hashes(seeds, positions, vocab_size, SECOND_DOMAIN)
        bits = high * (1 << 21) + _shifted_right(hashed, 11)  # 53
        uniform = (bits.to(torch.float64) + 0.5) * 2.0**-53
        uniform = torch.where(uniform == 1.0, uniform - 2.0**-53, uniform)
        return uniform.log_().neg_().log_().neg_()
    high, low = _shifted_right(hashed, 16).to(torch.float32), (hashed & 0xFFFF).to(torch.float32)
    uniform = high * 2.0**-16 + (low + 0.5) * 2.0**-32
    return log1p_of_negative(uniform).neg_().log_().neg_()


def log1p_of_negative(value: torch.Tensor) -> torch.Tensor:
    """log(1 - value) for fp32 from 0 to 1, by eight terms of its series below a quarter."""
    series = torch.full_like(value, 1.0 / 8.0)
    for term in range(7, 0, -1):
        series = 1.0 / term + value * series
    direct = (1.0 - value).clamp_(min=SMALLEST).log_()
    return torch.where(value < 0.25, -value * series, direct)


def token_hashes(
    seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int, domain: int = 0
) -> torch.Tensor:
    """32-bit hashes of a seed, a position and each token: [L, V] int64. Murmur3's mixing."""
    hashed = torch.full_like(seeds, domain)
    low, high = seeds.contiguous().view(torch.int32).view(-1, 2).to(torch.int64).unbind(dim=1)
    for word in (low & WORD, high & WORD, positions.to(torch.int64) & WORD):
        hashed = _mixed(hashed, _mixed_key(word))
    hashed = _mixed(hashed.unsqueeze(1), _token_keys(vocab_size, seeds.device))
    hashed = _xor(hashed, 16)  # number of bytes mixed
    hashed = _times(_xor(hashed, _shifted_right(hashed, 16)), 0x85EBCA6B)
    hashed = _times(_xor(hashed, _shifted_right(hashed, 13)), 0xC2B2AE35)
    return _xor(hashed, _shifted_right(hashed, 16))


@cache
def _token_keys(vocab_size: int, device: torch.device) -> torch.Tensor:
    """The hash keys of tokens: [1, V]; the same in every step."""
    return _mixed_key(torch.arange(vocab_size, device=device, dtype=torch.int64)).unsqueeze(0)


def _mixed_key(word: torch.Tensor) -> torch.Tensor:
    return _times(_rotated(_times(word, 0xCC9E2D51), 15), 0x1B873593)


def _mixed(hashed: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return (_rotated(_xor(hashed, key), 13) * 5 + 0xE6546B64) & WORD


def _xor(one: torch.Tensor, other: torch.Tensor | int) -> torch.Tensor:
    """Exclusive or, composed of operators that CANN documents for int64."""
    return one + other - (one & other) * 2


def _rotated(word: torch.Tensor, bits: int) -> torch.Tensor:
    shifted = word * (1 << bits)
    return (shifted & WORD) + _high(shifted)


def _shifted_right(word: torch.Tensor, bits: int) -> torch.Tensor:
    return _high(word * (1 << (32 - bits)))


def _high(number: torch.Tensor) -> torch.Tensor:
    """The upper 32 bits of an int64 below 2 ** 63."""
    return number.contiguous().view(torch.int32)[..., 1::2].to(torch.int64)


def _times(word: torch.Tensor, factor: int) -> torch.Tensor:
    """The product's low 32 bits, by halves: the whole product would overflow int64."""
    low, high = word & 0xFFFF, _shifted_right(word, 16)
    return (low * factor + ((high * factor) & 0xFFFF) * (1 << 16)) & WORD


def trace_replay(
    sampled: torch.Tensor,
    idx_mapping: torch.Tensor,
    trace_token_ids: torch.Tensor,
    trace_token_ids_stride: int,
    trace_len: torch.Tensor,
    total_len: torch.Tensor,
    prompt_len: torch.Tensor,
    **_: Any,
) -> None:
    """Replaces tokens by the request's trace, as far as it reaches.

    sampled:         [B] int64, in place
    idx_mapping:     [B] int64, slots; -1: the request is left unchanged
    trace_token_ids: [R, longest request] int32
    trace_len, total_len, prompt_len: [R] int32
    """
    slots = idx_mapping.clamp(min=0)
    number = total_len.index_select(0, slots) - prompt_len.index_select(0, slots)
    is_traced = (idx_mapping >= 0) & (number >= 0) & (number < trace_len.index_select(0, slots))
    last = trace_token_ids.shape[1] - 1
    places = slots * trace_token_ids_stride + number.clamp(0, last)
    tokens = trace_token_ids.view(-1).index_select(0, places)
    sampled.copy_(torch.where(is_traced, tokens.to(sampled.dtype), sampled))


def compact_sampling_mask(
    logits: torch.Tensor,
    logits_row_stride: int,
    logits_col_stride: int,
    cu_num_logits: torch.Tensor,
    num_sampled_tokens: torch.Tensor,
    token_ids: torch.Tensor,
    token_ids_row_stride: int,
    packed_mask: torch.Tensor,
    packed_mask_row_stride: int,
    counts: torch.Tensor,
    vocab_size: int,
    max_num_kept: int,
    ROWS_PER_REQUEST: int = 1,
    **_: Any,
) -> None:
    """Writes the tokens that a row of logits allows: the finite entries.

    cu_num_logits:      [B + 1] int32, the first row of logits of each request
    num_sampled_tokens: [B] int32; number of valid rows of a request's M = ROWS_PER_REQUEST rows
    token_ids:          [B * M, max_num_kept] int32, the first allowed tokens
    packed_mask:        [B * M, V / 8] uint8, a bit for each token
    counts:             [B * M] int32, number of allowed tokens; 0 in invalid rows, otherwise
                        unwritten
    """
    rows = torch.arange(counts.shape[0], device=logits.device)
    request = torch.div(rows, ROWS_PER_REQUEST, rounding_mode="floor")
    number = rows - request * ROWS_PER_REQUEST
    is_there = number < num_sampled_tokens.index_select(0, request)
    source = cu_num_logits.index_select(0, request) + number
    of_row = logits.index_select(0, source.clamp(max=logits.shape[0] - 1))
    allowed = (of_row > -torch.inf) & (of_row < torch.inf)
    count = allowed.sum(dim=1, dtype=counts.dtype)
    counts.copy_(count * is_there)

    tokens = torch.arange(vocab_size, device=logits.device, dtype=torch.int32)
    first = torch.where(allowed, tokens, vocab_size).topk(max_num_kept, largest=False).values
    is_written = (tokens[:max_num_kept] < count.unsqueeze(1)) & is_there.unsqueeze(1)
    token_ids.copy_(torch.where(is_written, first, token_ids))

    num_bytes = packed_mask.shape[1]
    bits = torch.nn.functional.pad(allowed.to(torch.int32), (0, num_bytes * 8 - vocab_size))
    weights = 2 ** torch.arange(8, device=logits.device, dtype=torch.int32)
    packed = (bits.view(-1, num_bytes, 8) * weights).sum(dim=2).to(packed_mask.dtype)
    packed_mask.copy_(torch.where(is_there.unsqueeze(1), packed, packed_mask))
