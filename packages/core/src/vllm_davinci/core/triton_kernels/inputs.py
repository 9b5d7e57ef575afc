"""A step's inputs, and updates after sampling, with torch operators.

Stand-ins for kernels of vLLM's V2 runner (v1/worker/gpu/input_batch.py). Parameters have the
kernels' names without `_ptr`; `BLOCK_SIZE` and other launch options are omitted. Nothing here reads
from the device. Shapes: B requests of the step, T rows of the buffers, L rows of logits,
R slots of requests, K drafts. A slot is a request's index in vLLM's request tables.

idx_mapping:     [B] int64, the slot of each request
query_start_loc: [B + 1 or more] int32, the first row of each request, then the end of the last
"""

from typing import Any

import torch


def request_of(ends: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The request of each row: [num_rows] int64; rows after the last end get the last request.

    ends: [B], the end of each request's rows
    """
    rows = torch.arange(num_rows, device=ends.device, dtype=ends.dtype)
    return (rows.unsqueeze(1) >= ends[:-1]).sum(dim=1)


def following(values: torch.Tensor) -> torch.Tensor:
    """Shifts values by one: the following value of each, and 0 for the last: [rows]."""
    return torch.nn.functional.pad(values[1:], (0, 1))


def prepare_prefill_inputs(
    input_ids: torch.Tensor,
    next_prefill_tokens: torch.Tensor,
    next_prefill_tokens_stride: int,
    num_lookahead: int,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    all_token_ids: torch.Tensor,
    all_token_ids_stride: int,
    prefill_lens: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    **_: Any,
) -> None:
    """Writes the prompts' tokens of a step, and the tokens that follow them.

    input_ids:           [T] int32, in place for requests still in their prompt
    next_prefill_tokens: [num_lookahead, R] int32, in place likewise; 0 after the prompt's end
    all_token_ids:       [R, longest request] int32
    prefill_lens, num_computed_tokens: [R] int32
    """
    num_reqs = idx_mapping.shape[0]
    starts, ends = query_start_loc[:num_reqs], query_start_loc[1 : num_reqs + 1]
    computed = num_computed_tokens.index_select(0, idx_mapping)
    prefill_len = prefill_lens.index_select(0, idx_mapping)
    is_prefill = computed < prefill_len

    num_rows, last = input_ids.shape[0], all_token_ids.shape[1] - 1
    rows = torch.arange(num_rows, device=input_ids.device, dtype=torch.int64)
    request = request_of(ends, num_rows)
    position = rows + (computed - starts).index_select(0, request)
    slot = idx_mapping.index_select(0, request)
    places = slot * all_token_ids_stride + position.clamp(0, last)
    tokens = all_token_ids.view(-1).index_select(0, places)
    is_written = is_prefill.index_select(0, request) & (rows < ends[-1])
    input_ids.copy_(torch.where(is_written, tokens, input_ids))

    ahead = torch.arange(num_lookahead, device=input_ids.device, dtype=torch.int64)
    following = (computed + ends - starts) + ahead.unsqueeze(1)  # [num_lookahead, B]
    places = idx_mapping * all_token_ids_stride + following.clamp(max=last)
    tokens = all_token_ids.view(-1).index_select(0, places.view(-1)).view(places.shape)
    tokens = torch.where(following < prefill_len, tokens, 0)
    before = next_prefill_tokens.index_select(1, idx_mapping)
    next_prefill_tokens.index_copy_(1, idx_mapping, torch.where(is_prefill, tokens, before))


def prepare_pos_seq_lens(
    pos: torch.Tensor,
    seq_lens: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    max_num_reqs: int,
    **_: Any,
) -> None:
    """Writes positions [T] int64 of the step's rows, and lengths [R] int32 by request, then 0."""
    num_reqs = idx_mapping.shape[0]
    starts, ends = query_start_loc[:num_reqs], query_start_loc[1 : num_reqs + 1]
    computed = num_computed_tokens.index_select(0, idx_mapping)
    seq_lens[num_reqs:max_num_reqs].zero_()
    torch.add(computed, ends - starts, out=seq_lens[:num_reqs])
    rows = torch.arange(pos.shape[0], device=pos.device, dtype=torch.int64)
    position = rows + (computed - starts).index_select(0, request_of(ends, pos.shape[0]))
    pos.copy_(torch.where(rows < ends[-1], position, pos))


def combine_sampled_and_draft_tokens(
    input_ids: torch.Tensor,
    idx_mapping: torch.Tensor,
    last_sampled_tokens: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    prefill_len: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_tokens_stride: int,
    cu_num_logits: torch.Tensor,
    logits_indices: torch.Tensor,
    NUM_NEW_SAMPLED_TOKENS: int = 1,
    **_: Any,
) -> None:
    """Writes the sampled rows, and their input tokens that only the device knows.

    A request's last rows are sampled. The first of them gets the previously sampled token, the
    others get the drafts; rows of the prompt keep their tokens.

    input_ids:           [T] int32, in place
    last_sampled_tokens: [R, 1] int64
    draft_tokens:        [R, K] int64
    cu_num_logits:       [B + 1] int32, the first sampled row of each request among all
    logits_indices:      [L] int64, written
    """
    num_reqs, num_logits = idx_mapping.shape[0], logits_indices.shape[0]
    ends, cu_ends = query_start_loc[1 : num_reqs + 1], cu_num_logits[1 : num_reqs + 1]
    numbers = torch.arange(num_logits, device=input_ids.device, dtype=torch.int64)
    request = request_of(cu_ends, num_logits)
    torch.add(numbers, (ends - cu_ends).index_select(0, request), out=logits_indices)

    slot = idx_mapping.index_select(0, request)
    starts = cu_num_logits[:num_reqs].index_select(0, request)
    place = numbers - starts  # index among the request's sampled rows
    num_rows = cu_ends.index_select(0, request) - starts
    seq_len = seq_lens.index_select(0, request)
    prompt = prefill_len.index_select(0, slot)
    is_output, begins_in_output = seq_len > prompt, seq_len - num_rows >= prompt
    tokens = last_sampled_tokens.view(-1).index_select(0, slot)
    is_newest = place < NUM_NEW_SAMPLED_TOKENS
    if draft_tokens.shape[1]:
        number = (place - NUM_NEW_SAMPLED_TOKENS).clamp_(min=0)
        drafts = draft_tokens.view(-1).index_select(0, slot * draft_tokens_stride + number)
        tokens = torch.where(is_newest, tokens, drafts)
    is_written = is_output & (~is_newest | begins_in_output)
    before = input_ids.index_select(0, logits_indices)
    tokens = torch.where(is_written, tokens.to(input_ids.dtype), before)
    input_ids.index_copy_(0, logits_indices, tokens)


def get_num_sampled_and_rejected(
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_num_logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    prefill_len: torch.Tensor,
    **_: Any,
) -> None:
    """Writes each request's numbers of new tokens and of rejected drafts: [B] int32.

    num_sampled holds the sampled tokens at first; a request still in its prompt gets none.
    """
    num_reqs = idx_mapping.shape[0]
    is_prompt = seq_lens[:num_reqs] < prefill_len.index_select(0, idx_mapping)
    num_sampled.masked_fill_(is_prompt, 0)
    num_logits = cu_num_logits[1 : num_reqs + 1] - cu_num_logits[:num_reqs]
    num_rejected.copy_((num_logits - num_sampled).masked_fill_(is_prompt, 0))


def post_update(
    idx_mapping: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    last_sampled_tokens: torch.Tensor,
    output_bin_counts: torch.Tensor | None,
    output_bin_counts_stride: int,
    sampled_tokens: torch.Tensor,
    sampled_tokens_stride: int,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    all_token_ids: torch.Tensor,
    all_token_ids_stride: int,
    total_len: torch.Tensor,
    draft_tokens: torch.Tensor | None,
    draft_tokens_out: torch.Tensor | None,
    num_draft_tokens: int,
    **_: Any,
) -> None:
    """Appends a step's tokens to their requests and advances the requests.

    Values change by a difference, which is 0 for a request with slot -1: its writes go to slot 0
    and leave it unchanged, whatever else is written.

    idx_mapping:         [B] int64; -1: the request is left unchanged
    num_computed_tokens, total_len: [R] int32, in place
    last_sampled_tokens: [R, 1] int64, in place
    output_bin_counts:   [R, vocabulary] int32, in place; None without counting
    sampled_tokens:      [B, 1 + K] int64
    num_sampled, num_rejected: [B] int32
    query_start_loc:     None: no token has been computed
    all_token_ids:       [R, longest request] int32, in place
    draft_tokens:        [B, num_draft_tokens] int64, stored in draft_tokens_out [R, ...]; or None
    """
    num_reqs, num_columns = idx_mapping.shape[0], sampled_tokens.shape[1]
    exists = idx_mapping >= 0
    slot = idx_mapping.clamp(min=0)
    count = num_sampled[:num_reqs] * exists
    length = total_len.index_select(0, slot)

    columns = torch.arange(num_columns, device=slot.device, dtype=torch.int64)
    has_room = length.unsqueeze(1) + columns < all_token_ids_stride
    is_token = (columns < count.unsqueeze(1)) & has_room
    tokens = sampled_tokens[:num_reqs].to(torch.int64)
    last = tokens.gather(1, (count - 1).clamp_(min=0).to(torch.int64).unsqueeze(1)).squeeze(1)
    newest = last_sampled_tokens.view(-1)
    newest.index_add_(0, slot, (last - newest.index_select(0, slot)) * (count > 0))

    places = (slot * all_token_ids_stride + length).unsqueeze(1) + columns
    places = places.clamp_(max=all_token_ids.numel() - 1).view(-1)
    known = all_token_ids.view(-1)
    change = (tokens.view(-1).to(known.dtype) - known.index_select(0, places)) * is_token.view(-1)
    known.index_add_(0, places, change.to(known.dtype))
    if output_bin_counts is not None:
        counts = (slot.unsqueeze(1) * output_bin_counts_stride + tokens * is_token).view(-1)
        output_bin_counts.view(-1).index_add_(0, counts, is_token.view(-1).to(torch.int32))
    total_len.index_add_(0, slot, count)
    if draft_tokens is not None:
        assert draft_tokens_out is not None
        _keep_drafts(draft_tokens_out, slot, draft_tokens[:num_reqs], exists)

    computed = -num_rejected[:num_reqs]
    if query_start_loc is not None:
        computed = computed + query_start_loc[1 : num_reqs + 1] - query_start_loc[:num_reqs]
    num_computed_tokens.index_add_(0, slot, computed * exists)


def _keep_drafts(
    kept: torch.Tensor, slot: torch.Tensor, drafts: torch.Tensor, exists: torch.Tensor
) -> None:
    """Writes drafts [B, K] to their requests' rows; requests that do not exist write nothing."""
    change = (drafts - kept.index_select(0, slot)) * exists.unsqueeze(1)
    kept.index_add_(0, slot, change)


def post_update_num_computed_tokens(
    idx_mapping: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    query_start_loc: torch.Tensor,
    **_: Any,
) -> None:
    """Advances each request by its tokens in the step. num_computed_tokens: [R]"""
    num_reqs = idx_mapping.shape[0]
    lengths = query_start_loc[1 : num_reqs + 1] - query_start_loc[:num_reqs]
    num_computed_tokens.index_add_(0, idx_mapping, lengths)


def expand_idx_mapping(
    idx_mapping: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    cu_num_logits: torch.Tensor,
    **_: Any,
) -> None:
    """Writes the slot of each row of logits, and the row's index within its request: [L]."""
    num_reqs, num_logits = idx_mapping.shape[0], expanded_idx_mapping.shape[0]
    request = request_of(cu_num_logits[1 : num_reqs + 1], num_logits)
    expanded_idx_mapping.copy_(idx_mapping.index_select(0, request))
    numbers = torch.arange(num_logits, device=idx_mapping.device, dtype=torch.int32)
    expanded_local_pos.copy_(numbers - cu_num_logits.index_select(0, request))


def dcp_local_seq_lens(
    out: torch.Tensor,
    seq_lens: torch.Tensor,
    dcp_size: int,
    dcp_rank: int,
    cp_interleave: int,
    num_reqs: int,
    max_num_reqs: int,
    BLOCK_SIZE: int,
    **_: Any,
) -> None:
    """Writes how many tokens of each request this rank keeps of a context that ranks divide.

    out:      [max_num_reqs] int32; 0 after the step's requests
    seq_lens: [num_reqs or more] int32
    """
    stripes = dcp_size * cp_interleave
    later = seq_lens[:num_reqs] - dcp_rank * cp_interleave  # tokens from its own first stripe on
    rounds = torch.div(later, stripes, rounding_mode="floor")
    rest = torch.sub(later, rounds, alpha=stripes).clamp(max=cp_interleave)
    out[:num_reqs].copy_(rest.add_(rounds, alpha=cp_interleave))
    out[num_reqs:max_num_reqs].zero_()
