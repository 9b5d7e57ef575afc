"""Ends a request's reasoning at its budget, with torch operators.

Stand-ins for kernels of vLLM's V2 runner (v1/worker/gpu/sample/thinking_budget.py), with
the same parameters without `_ptr`. Nothing here reads from the device. Shapes: B requests with
or without budgets, L rows of logits, R slots of requests, K drafts of a request.

thinking_token_budget: [R] int32, tokens between the markers; negative: the request has no budget
all_token_ids:         [R, longest request] int32
total_len:             [R] int32, tokens that a request has
cached_last_start, cached_last_end: [R] int32, start of the last marker; -1: none
reasoning_start_token_ids, natural_reasoning_end_token_ids, reasoning_end_token_ids: int32, the
    markers: of the start, of the end as models write it, and of the forced end
"""

from typing import Any

import torch


def update_committed_marker_cache(
    req_ids: torch.Tensor,
    thinking_token_budget: torch.Tensor,
    all_token_ids: torch.Tensor,
    all_token_ids_stride: int,
    total_len: torch.Tensor,
    cached_last_start: torch.Tensor,
    cached_last_end: torch.Tensor,
    cached_scan_pos: torch.Tensor,
    reasoning_start_token_ids: torch.Tensor,
    natural_reasoning_end_token_ids: torch.Tensor,
    MAX_LEN: int = 1,
    **_: Any,
) -> None:
    """Searches for markers in tokens added since the last search. req_ids: [B] int64, slots

    cached_scan_pos: [R] int32, start of the next search
    """
    tokens = all_token_ids.index_select(0, req_ids)
    length = total_len.index_select(0, req_ids)
    begin = cached_scan_pos.index_select(0, req_ids)
    has_budget = thinking_token_budget.index_select(0, req_ids) >= 0
    is_stale = begin > length  # the slot now belongs to another request
    begin = begin.masked_fill(is_stale, 0)
    for cached, marker in (
        (cached_last_start, reasoning_start_token_ids),
        (cached_last_end, natural_reasoning_end_token_ids),
    ):
        before = cached.index_select(0, req_ids)
        found = _last_match(tokens, marker, begin, length)
        now = torch.where(found >= 0, found, before.masked_fill(is_stale, -1))
        cached.index_copy_(0, req_ids, torch.where(has_budget, now.to(cached.dtype), before))
    before = cached_scan_pos.index_select(0, req_ids)
    now = (length - (MAX_LEN - 1)).clamp_(min=0)
    cached_scan_pos.index_copy_(0, req_ids, torch.where(has_budget, now, before))


def _last_match(
    tokens: torch.Tensor, marker: torch.Tensor, begin: torch.Tensor, end: torch.Tensor
) -> torch.Tensor:
    """Last start of a marker among tokens [B, W], from `begin` [B] on and ending before `end`.

    Returns [B] int64, -1 without a match.
    """
    size = marker.shape[0]
    windows = tokens.unfold(1, size, 1)  # [B, W - size + 1, size]
    places = torch.arange(windows.shape[1], device=tokens.device)
    is_match = (windows == marker).all(dim=2)
    is_match &= (places >= begin.unsqueeze(1)) & (places + size <= end.unsqueeze(1))
    return torch.where(is_match, places, -1).amax(dim=1)


def thinking_budget(
    logits: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping: torch.Tensor,
    thinking_token_budget: torch.Tensor,
    all_token_ids: torch.Tensor,
    all_token_ids_stride: int,
    total_len: torch.Tensor,
    input_ids: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    cached_last_start: torch.Tensor,
    cached_last_end: torch.Tensor,
    reasoning_start_token_ids: torch.Tensor,
    natural_reasoning_end_token_ids: torch.Tensor,
    reasoning_end_token_ids: torch.Tensor,
    **_: Any,
) -> None:
    """Raises the logit of the forced marker's next token when the budget is used up.

    logits:               [L, V] fp32, in place
    expanded_idx_mapping: [L] int64, the slot of each row
    input_ids:            [L] int32, the token before each row: the newest one, then drafts
    expanded_local_pos:   [L] int32, number of drafts before each row
    """
    start, natural_end, end = (
        reasoning_start_token_ids,
        natural_reasoning_end_token_ids,
        reasoning_end_token_ids,
    )
    slots, local = expanded_idx_mapping, expanded_local_pos.to(torch.int64)
    length = total_len.index_select(0, slots).to(torch.int64)
    # The newest tokens of each row's request, and the drafts before the row: element
    # `margin + local` would be the row's own token.
    margin = max(each.shape[0] for each in (start, natural_end, end))
    tokens = _newest(all_token_ids, all_token_ids_stride, slots, length, input_ids, local, margin)
    first = length - margin  # the position of element 0
    stop = margin + local

    def last(cached: torch.Tensor, marker: torch.Tensor) -> torch.Tensor:
        begin = (-first).clamp_(min=margin - marker.shape[0] + 1)
        found = _last_match(tokens, marker, begin, stop)
        return torch.where(found >= 0, found + first, cached.index_select(0, slots).to(found.dtype))

    last_start, last_end = last(cached_last_start, start), last(cached_last_end, natural_end)
    budget = thinking_token_budget.index_select(0, slots)
    num_reasoning = length + local - (last_start + start.shape[0])
    is_over = (budget >= 0) & (last_start >= 0) & (last_start > last_end)
    is_over &= num_reasoning >= budget

    done = torch.zeros_like(length)  # tokens of the forced marker that are already present
    for size in range(1, end.shape[0]):
        places = torch.arange(size, device=end.device) - size + stop.unsqueeze(1)
        is_prefix = (tokens.gather(1, places) == end[:size]).all(dim=1) & (length + local >= size)
        done = done.masked_fill(is_prefix, size)
    forced = end.index_select(0, done).to(torch.int64).unsqueeze(1)
    before = logits.gather(1, forced)
    logits.scatter_(1, forced, torch.where(is_over.unsqueeze(1), 1.0e9, before))


def _newest(
    all_token_ids: torch.Tensor,
    all_token_ids_stride: int,
    slots: torch.Tensor,
    length: torch.Tensor,
    input_ids: torch.Tensor,
    local: torch.Tensor,
    margin: int,
) -> torch.Tensor:
    """`margin` tokens of each row's request, then drafts up to the row: [L, margin + L]; -1 before.

    Elements after the row belong to another one.
    """
    num_rows = slots.shape[0]
    rows = torch.arange(num_rows, device=slots.device)
    back = torch.arange(-margin, 0, device=slots.device)
    known = length.unsqueeze(1) + back
    places = slots.unsqueeze(1) * all_token_ids_stride + known.clamp(min=0)
    tokens = all_token_ids.view(-1).index_select(0, places.view(-1)).view(places.shape)
    drafts = (rows - local).unsqueeze(1) + 1 + rows  # a row per draft, after the newest token's
    of_drafts = input_ids[:num_rows].index_select(0, drafts.clamp_(max=num_rows - 1).view(-1))
    tokens = tokens.masked_fill(known < 0, -1)
    return torch.cat([tokens, of_drafts.view(num_rows, num_rows).to(tokens.dtype)], dim=1)
