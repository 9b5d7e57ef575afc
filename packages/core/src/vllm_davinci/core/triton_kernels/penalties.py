"""Logits processing with torch operators: penalties, bad words, biases, grammars.

Stand-ins for kernels of vLLM's V2 runner (v1/worker/gpu/sample, structured_outputs.py), with
the same parameters without `_ptr`. Nothing here reads from the device. Shapes: L rows of logits, V
entries of the vocabulary, R slots of requests, B requests.

logits:               [L, V] fp32, changed in place
expanded_idx_mapping: [L] int64, the slot of each row's request
expanded_local_pos:   [L] int32, the row's index within its request: the number of drafts before it
"""

from functools import cache
from typing import Any

import torch

BITS = 32  # bits of a mask word, lowest first


def bits_of(words: torch.Tensor, size: int) -> torch.Tensor:
    """The first `size` bits of each row of words [n, words] int32: [n, size] bool."""
    shifts = torch.arange(BITS, device=words.device, dtype=torch.int32)
    bits = torch.bitwise_right_shift(words.unsqueeze(2), shifts) & 1
    return bits.flatten(1)[:, :size].to(torch.bool)


def bincount(
    expanded_idx_mapping: torch.Tensor,
    all_token_ids: torch.Tensor,
    all_token_ids_stride: int,
    prompt_len: torch.Tensor,
    prefill_len: torch.Tensor,
    prompt_bin_mask: torch.Tensor,
    prompt_bin_mask_stride: int,
    output_bin_counts: torch.Tensor,
    output_bin_counts_stride: int,
    **_: Any,
) -> None:
    """Records new requests' tokens: a mask of prompt tokens, and counts of output tokens.

    expanded_idx_mapping: [B] int64, their slots
    all_token_ids:        [R, longest request] int32
    prompt_len, prefill_len: [R] int32; tokens between them are output of a resumed request
    prompt_bin_mask:      [R, words] int32, a bit per token, 0 for these requests at first
    output_bin_counts:    [R, V] int32, likewise
    """
    slots, vocabulary = expanded_idx_mapping, output_bin_counts.shape[1]
    places = torch.arange(all_token_ids.shape[1], device=slots.device, dtype=torch.int32)
    prompts = prompt_len.index_select(0, slots).unsqueeze(1)
    ends = prefill_len.index_select(0, slots).unsqueeze(1)
    in_prompt, in_output = places < prompts, (places >= prompts) & (places < ends)
    tokens = all_token_ids.index_select(0, slots).clamp(0, vocabulary - 1).to(torch.int64)

    counts = torch.zeros(
        (slots.shape[0], vocabulary), dtype=torch.int32, device=output_bin_counts.device
    )
    counts.scatter_add_(1, tokens, in_output.to(torch.int32))
    output_bin_counts.index_copy_(0, slots, counts)

    width = prompt_bin_mask.shape[1]
    found = torch.zeros((slots.shape[0], width * BITS), dtype=torch.int32, device=slots.device)
    found.scatter_add_(1, tokens, in_prompt.to(torch.int32))
    values = (found.view(-1, width, BITS) > 0) * _values_of_bits(slots.device)
    words = values.sum(dim=2).view(torch.int32)[:, ::2]  # the low half of each
    prompt_bin_mask.index_copy_(0, slots, words.contiguous())


@cache
def _values_of_bits(device: torch.device) -> torch.Tensor:
    return torch.tensor([1 << bit for bit in range(BITS)], dtype=torch.int64, device=device)


def penalties(
    logits: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping: torch.Tensor,
    token_ids: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    repetition_penalty: torch.Tensor,
    frequency_penalty: torch.Tensor,
    presence_penalty: torch.Tensor,
    prompt_bin_mask: torch.Tensor,
    prompt_bin_mask_stride: int,
    output_bin_counts: torch.Tensor,
    output_bin_counts_stride: int,
    vocab_size: int,
    **_: Any,
) -> None:
    """Applies repetition, frequency and presence penalties.

    token_ids: [L] int32, the inputs of these rows: drafts, after a request's first row
    repetition_penalty, frequency_penalty, presence_penalty: [R] fp32; 1, 0 and 0 change nothing
    prompt_bin_mask: [R, words] int32; output_bin_counts: [R, V] int32
    """
    slots, num_rows = expanded_idx_mapping, logits.shape[0]
    counts = output_bin_counts.index_select(0, slots)
    drafts = _drafts_before(expanded_local_pos, num_rows)
    if drafts is not None:
        is_draft, of_row = drafts
        tokens = token_ids.index_select(0, of_row.clamp(max=num_rows - 1).view(-1))
        tokens = tokens.view(num_rows, -1).to(torch.int64).clamp(0, vocab_size - 1)
        counts.scatter_add_(1, tokens, is_draft.to(torch.int32))
    in_output = counts > 0
    repetition, frequency, presence = (
        each.index_select(0, slots).unsqueeze(1)
        for each in (repetition_penalty, frequency_penalty, presence_penalty)
    )
    in_prompt = bits_of(prompt_bin_mask.index_select(0, slots), vocab_size)
    scale = torch.where(in_prompt | in_output, repetition, 1.0)
    changed = logits * torch.where(logits > 0, 1.0 / scale, scale)
    changed -= frequency * counts
    changed -= presence * in_output
    logits.copy_(changed)


def _drafts_before(
    expanded_local_pos: torch.Tensor, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """For each row, the rows whose inputs are the drafts before it: a mask, and row indices.

    Both [L, L]: a row has fewer drafts before it than there are rows. None if there is one row.
    """
    if num_rows == 1:
        return None
    rows = torch.arange(num_rows, device=expanded_local_pos.device, dtype=torch.int64)
    numbers = torch.arange(num_rows - 1, device=rows.device, dtype=torch.int64)
    before = expanded_local_pos.unsqueeze(1)
    return numbers < before, rows.unsqueeze(1) - before + numbers + 1


def bad_words(
    logits: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping: torch.Tensor,
    bad_word_token_ids: torch.Tensor,
    bad_word_token_ids_stride: int,
    bad_word_offsets: torch.Tensor,
    bad_word_offsets_stride: int,
    num_bad_words: torch.Tensor,
    all_token_ids: torch.Tensor,
    all_token_ids_stride: int,
    prompt_len: torch.Tensor,
    total_len: torch.Tensor,
    input_ids: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    **_: Any,
) -> None:
    """Excludes the last token of each bad word whose other tokens end the output.

    bad_word_token_ids: [R, tokens] int32, a request's words, concatenated
    bad_word_offsets:   [R, words + 1] int32, start of each word, then the end of the last
    num_bad_words, prompt_len, total_len: [R] int32
    input_ids:          [L] int32, the inputs of these rows
    """
    slots, num_rows = expanded_idx_mapping, logits.shape[0]
    offsets, words = (
        each.index_select(0, slots) for each in (bad_word_offsets, bad_word_token_ids)
    )
    num_words, width = offsets.shape[1] - 1, words.shape[1]
    starts, ends = offsets[:, :-1], offsets[:, 1:]  # [L, words]
    place = expanded_local_pos.unsqueeze(1)
    prompt = prompt_len.index_select(0, slots).unsqueeze(1)
    output_len = total_len.index_select(0, slots).unsqueeze(1) - prompt
    number = torch.arange(num_words, device=slots.device, dtype=torch.int32)
    prefix = ends - starts - 1
    counts = num_bad_words.index_select(0, slots).unsqueeze(1)
    matches = (number < counts) & (prefix <= output_len + place)

    # A bad word without its last token must match the end of the output.
    begun = torch.zeros((num_rows, width + 1), dtype=torch.int32, device=slots.device)
    places = ends.clamp(0, width).to(torch.int64)
    begun.scatter_add_(1, places, (number < counts).to(torch.int32))
    word = begun[:, :width].cumsum(dim=1).clamp_(max=num_words - 1)
    tokens = torch.arange(width, device=slots.device, dtype=torch.int32)
    is_prefix = (word < counts) & (tokens < ends.gather(1, word) - 1)
    position = output_len + place - prefix.gather(1, word) + tokens - starts.gather(1, word)
    from_drafts = position >= output_len
    row = torch.arange(num_rows, device=slots.device, dtype=torch.int64).unsqueeze(1)
    draft_row = (row - place + position - output_len + 1).clamp(0, num_rows - 1)
    known = (prompt + position).clamp(0, all_token_ids.shape[1] - 1).to(torch.int64)
    actual = torch.where(
        from_drafts,
        input_ids.index_select(0, draft_row.view(-1).to(torch.int64)).view(num_rows, width),
        all_token_ids.index_select(0, slots).gather(1, known),
    )
    differs = (is_prefix & (words != actual)).to(torch.int32)
    wrong = torch.zeros((num_rows, num_words), dtype=torch.int32, device=slots.device)
    wrong.scatter_add_(1, word, differs)
    matches &= wrong == 0

    last = words.gather(1, (ends - 1).clamp(min=0).to(torch.int64)).to(torch.int64)
    excluded = torch.zeros_like(logits, dtype=torch.int32)
    excluded.scatter_add_(1, last.clamp(0, logits.shape[1] - 1), matches.to(torch.int32))
    logits.masked_fill_(excluded > 0, -torch.inf)


def bias(
    logits: torch.Tensor,
    logits_stride: int,
    vocab_size: int,
    expanded_idx_mapping: torch.Tensor,
    num_allowed_token_ids: torch.Tensor,
    allowed_token_ids: torch.Tensor,
    allowed_token_ids_stride: int,
    num_logit_bias: torch.Tensor,
    bias_token_ids: torch.Tensor,
    bias_token_ids_stride: int,
    bias: torch.Tensor,
    bias_stride: int,
    pos: torch.Tensor,
    min_lens: torch.Tensor,
    num_stop_token_ids: torch.Tensor,
    restore_when_all_masked: torch.Tensor,
    stop_token_ids: torch.Tensor,
    stop_token_ids_stride: int,
    CHECK_ALL_MASKED_ROWS: bool = False,
    **_: Any,
) -> None:
    """Applies allowed tokens and biases, and excludes stop tokens of outputs that are too short.

    num_...:  [R] int32, number of valid entries per row of allowed_token_ids, bias_token_ids with
              bias (fp32) and stop_token_ids: [R, most] each
    pos:      [L] int64, the row's position; min_lens: [R] int32, minimum tokens of a request
    restore_when_all_masked: [R] int32, whether to allow stop tokens again if no other token is left
    """
    slots = expanded_idx_mapping
    allowed = _listed(allowed_token_ids, num_allowed_token_ids, slots, vocab_size)
    is_any = num_allowed_token_ids.index_select(0, slots).unsqueeze(1) > 0
    logits.masked_fill_(is_any & ~allowed, -torch.inf)

    counts = num_logit_bias.index_select(0, slots).unsqueeze(1)
    columns = torch.arange(bias.shape[1], device=slots.device, dtype=torch.int32)
    tokens = bias_token_ids.index_select(0, slots).to(torch.int64).clamp(0, vocab_size - 1)
    added = bias.index_select(0, slots).masked_fill(columns >= counts, 0.0)
    logits.scatter_add_(1, tokens, added.to(logits.dtype))

    stops = _listed(stop_token_ids, num_stop_token_ids, slots, vocab_size)
    is_short = pos + 1 < min_lens.index_select(0, slots)
    excluded = stops & is_short.unsqueeze(1)
    if CHECK_ALL_MASKED_ROWS:
        left = logits.masked_fill(excluded, -torch.inf).amax(dim=1)
        returns = (restore_when_all_masked.index_select(0, slots) != 0) & (left == -torch.inf)
        excluded &= ~returns.unsqueeze(1) | logits.isinf()
    logits.masked_fill_(excluded, -torch.inf)


def _listed(
    tokens: torch.Tensor, counts: torch.Tensor, slots: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """Returns a mask [L, V] of the tokens in these slots' lists. tokens: [R, most]; counts: [R]"""
    columns = torch.arange(tokens.shape[1], device=slots.device, dtype=torch.int32)
    counted = (columns < counts.index_select(0, slots).unsqueeze(1)).to(torch.int32)
    listed = torch.zeros((slots.shape[0], vocab_size), dtype=torch.int32, device=slots.device)
    of_rows = tokens.index_select(0, slots).to(torch.int64).clamp(0, vocab_size - 1)
    return listed.scatter_add_(1, of_rows, counted) > 0


def apply_grammar_bitmask(
    logits: torch.Tensor,
    logits_stride: int,
    logits_indices: torch.Tensor,
    cu_num_logits: torch.Tensor,
    bitmask: torch.Tensor,
    bitmask_stride: int,
    vocab_size: int,
    MASK_STRIDE: int = 1,
    **_: Any,
) -> None:
    """Excludes the tokens that a request's grammar does not allow next.

    logits_indices: [masks] int32, request * MASK_STRIDE + index among its rows
    cu_num_logits:  [B + 1] int32
    bitmask:        [masks, words] int32, a bit per allowed token
    """
    request = logits_indices // MASK_STRIDE
    place = logits_indices - request * MASK_STRIDE
    first = cu_num_logits.index_select(0, request)
    row = first + place
    exists = row < cu_num_logits.index_select(0, request + 1)
    # A mask without a row excludes nothing (`& exists`), so its clamped row index does no harm.
    row = row.clamp(max=logits.shape[0] - 1).to(torch.int64)
    refused = ~bits_of(bitmask, vocab_size) & exists.unsqueeze(1)
    excluded = torch.zeros((logits.shape[0], vocab_size), dtype=torch.int32, device=logits.device)
    excluded.index_add_(0, row, refused.to(torch.int32))
    logits[:, :vocab_size].masked_fill_(excluded > 0, -torch.inf)
