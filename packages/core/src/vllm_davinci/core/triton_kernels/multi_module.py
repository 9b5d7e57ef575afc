"""Inputs of MTP with several modules, with torch operators.

Stand-ins for kernels of vLLM's V2 runner (spec_decode/multi_module_mtp/speculator.py),
with the same parameters without `_ptr`. Nothing here reads from the device.

A step's first module has the accepted rows of the target's step, each with the next row's token. If
drafts were rejected, rows of the previous step come before them, one fewer than the rejected
drafts, because later modules have computed these from wrong drafts. Each later module has the same
rows, shifted by one token. Shapes: B requests, T rows of the target's step, K drafts, W = K - 1
cached rows, R slots of requests. Slot -1 is a request that stores nothing: its values go to the
last row of a table, which belongs to no request.
"""

from typing import Any

import torch

from vllm_davinci.core.triton_kernels.inputs import following, request_of

IMAGES = "MTP of models with images is refused at start"


class _Rows:
    """The rows of a step's first module.

    request, number: [T] int64, request of each row, and number of the row in its request
    again: [B] int32, rows of the previous step
    last:  [B] int32, the last accepted row
    """

    def __init__(
        self,
        query_start_loc: torch.Tensor,
        num_rejected: torch.Tensor,
        num_reqs: int,
        num_rows: int,
        positions: torch.Tensor | None,
    ) -> None:
        self.starts, ends = query_start_loc[:num_reqs], query_start_loc[1 : num_reqs + 1]
        rejected = num_rejected[:num_reqs]
        self.again = (rejected - 1).clamp_(min=0)
        if positions is not None:  # a short prompt has fewer rows of the previous step
            first = positions.index_select(0, self.starts.to(torch.int64)).to(torch.int32)
            self.again = torch.where(first < self.again, first, self.again)
        self.last = ends - 1 - rejected + self.again
        self.request = request_of(ends, num_rows)
        self.row = torch.arange(num_rows, device=ends.device, dtype=torch.int64)
        self.number = self.row - self.starts.index_select(0, self.request)
        self._again = self.again.index_select(0, self.request)
        self.is_again = self.number < self._again
        self.beyond = self.row - self.last.index_select(0, self.request)
        self.source = (self.row - self._again).clamp_(min=0)  # index of the target's row

    def cached(self, table: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """The cached value of each row, [T, ...]; only defined for rows of the previous step.

        table: [R, W, ...]; slots: [B]
        """
        width = table.shape[1]
        place = (self.number - self._again + width).clamp_(0, width - 1)
        index = slots.clamp(min=0).index_select(0, self.request) * width + place
        return table.view(-1, *table.shape[2:]).index_select(0, index)


def prepare_input_buffers(
    last_token_indices: torch.Tensor,
    draft_input_ids: torch.Tensor,
    draft_positions: torch.Tensor,
    draft_seq_lens: torch.Tensor,
    target_input_ids: torch.Tensor,
    target_positions: torch.Tensor,
    cached_draft_input_ids: torch.Tensor,
    cached_draft_input_ids_stride0: int,
    draft_input_id_overrides: torch.Tensor,
    draft_input_id_overrides_stride0: int,
    idx_mapping: torch.Tensor,
    last_sampled: torch.Tensor,
    next_prefill_tokens: torch.Tensor,
    next_prefill_tokens_stride0: int,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    target_seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_num_reqs: int,
    num_speculative_steps: int,
    **_: Any,
) -> None:
    """Writes tokens, positions and lengths for the first module. Unused rows stay unchanged.

    last_token_indices: [R] int64, the last accepted row of each request; then 0
    draft_input_ids:    [T or more] int32; draft_positions: likewise, int64
    draft_seq_lens:     [R] int32, tokens up to the last row, rejected ones included; then 0
    cached_draft_input_ids:   [R, W] int64, of the previous step
    draft_input_id_overrides: [R, W] int64, the prompt's tokens for later modules; -1: the draft
    last_sampled:       [R, 1] int64; next_prefill_tokens: [K or more, R] int32, of prompts
    """
    num_reqs, num_rows = idx_mapping.shape[0], target_input_ids.shape[0]
    rows = _Rows(query_start_loc, num_rejected, num_reqs, num_rows, target_positions)
    newest = last_sampled.view(-1).index_select(0, idx_mapping)
    of_prompt = next_prefill_tokens.index_select(1, idx_mapping)
    is_sampled = num_sampled[:num_reqs] > 0
    tokens = torch.where(is_sampled, newest.to(torch.int32), of_prompt[0].to(torch.int32))
    later = of_prompt[1:num_speculative_steps].t().to(torch.int64)
    draft_input_id_overrides[:num_reqs].copy_(torch.where(is_sampled.unsqueeze(1), -1, later))

    ids, positions = draft_input_ids[:num_rows], draft_positions[:num_rows]
    again = rows.cached(cached_draft_input_ids, idx_mapping).to(torch.int32)
    shifted = following(target_input_ids).index_select(0, rows.source)
    accepted = torch.where(rows.is_again, again, shifted)
    newest = torch.where(rows.beyond == 0, tokens.index_select(0, rows.request), ids)
    ids.copy_(torch.where(rows.beyond < 0, accepted, newest))
    first = target_positions.index_select(0, rows.starts.to(torch.int64)) - rows.again
    moved = first.index_select(0, rows.request) + rows.number
    of_target = target_positions.index_select(0, rows.source)
    accepted = torch.where(rows.is_again, moved, of_target)
    positions.copy_(torch.where(rows.beyond < 1, accepted, positions))

    query_start_loc[num_reqs : max_num_reqs + 1].copy_(
        query_start_loc[num_reqs : num_reqs + 1].expand(max_num_reqs + 1 - num_reqs).clone()
    )
    draft_seq_lens[:num_reqs].copy_(target_seq_lens[:num_reqs] - rows.again)
    draft_seq_lens[num_reqs:max_num_reqs].zero_()
    last_token_indices[:num_reqs].copy_(rows.last)
    last_token_indices[num_reqs:max_num_reqs].zero_()


def prepare_input_hidden_states_and_embeddings(
    draft_input_hidden_states: torch.Tensor,
    draft_input_hidden_states_stride0: int,
    target_hidden_states: torch.Tensor,
    target_hidden_states_stride0: int,
    cached_target_hidden_states: torch.Tensor,
    cached_target_hidden_states_stride0: int,
    cached_target_hidden_states_stride1: int,
    input_embeds: torch.Tensor | None,
    input_embeds_stride0: int,
    cached_draft_input_embeds: torch.Tensor | None,
    cached_draft_input_embeds_stride0: int,
    cached_draft_input_embeds_stride1: int,
    idx_mapping: torch.Tensor,
    num_rejected: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_speculative_steps: int,
    hidden_size: int,
    USE_INPUT_EMBEDS: bool = False,
    **_: Any,
) -> None:
    """Writes hidden states for the first module: see `write_hidden_states`."""
    assert not USE_INPUT_EMBEDS, IMAGES
    states = draft_input_hidden_states, target_hidden_states, cached_target_hidden_states
    write_hidden_states(*states, idx_mapping, num_rejected, query_start_loc)


def write_hidden_states(
    out: torch.Tensor,
    of_target: torch.Tensor,
    cached: torch.Tensor,
    idx_mapping: torch.Tensor,
    num_rejected: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor | None = None,
) -> None:
    """Writes hidden states for the first module.

    out:       [T or more, hidden_size]
    of_target: [T, hidden_size]; cached: [R, W, hidden_size], of the previous step
    positions: [T] int64, of the target's step. The kernel does not get them: without them no
               request may be shorter than W tokens before the step.
    """
    num_reqs, num_rows = idx_mapping.shape[0], of_target.shape[0]
    rows = _Rows(query_start_loc, num_rejected, num_reqs, num_rows, positions)
    again = rows.cached(cached, idx_mapping)
    of_step = of_target.index_select(0, rows.source)
    accepted = torch.where(rows.is_again.unsqueeze(1), again, of_step)
    states = out[:num_rows]
    states.copy_(torch.where((rows.beyond < 1).unsqueeze(1), accepted, states))


def pad_trailing_draft_slots(
    slot_mappings: torch.Tensor,
    slot_mappings_stride0: int,
    query_start_loc: torch.Tensor,
    last_token_indices: torch.Tensor,
    PAD_ID: int,
    **_: Any,
) -> None:
    """Removes the cache slots of rows after each request's last accepted row.

    slot_mappings: [groups, T] int64, in place; last_token_indices: [B] int64
    """
    num_reqs, num_rows = last_token_indices.shape[0], slot_mappings.shape[1]
    ends = query_start_loc[1 : num_reqs + 1]
    rows = torch.arange(num_rows, device=ends.device, dtype=torch.int64)
    is_unused = rows > last_token_indices.index_select(0, request_of(ends, num_rows))
    slot_mappings.masked_fill_(is_unused & (rows < ends[-1]), PAD_ID)


def cache_inputs(
    draft_input_ids: torch.Tensor,
    draft_input_embeds: torch.Tensor | None,
    draft_input_embeds_stride0: int,
    draft_input_hidden_states: torch.Tensor,
    draft_input_hidden_states_stride0: int,
    cached_draft_input_ids: torch.Tensor,
    cached_draft_input_ids_stride0: int,
    cached_draft_input_embeds: torch.Tensor | None,
    cached_draft_input_embeds_stride0: int,
    cached_draft_input_embeds_stride1: int,
    cached_target_hidden_states: torch.Tensor,
    cached_target_hidden_states_stride0: int,
    cached_target_hidden_states_stride1: int,
    idx_mapping: torch.Tensor,
    last_token_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_speculative_steps: int,
    hidden_size: int,
    USE_INPUT_EMBEDS: bool = False,
    **_: Any,
) -> None:
    """Stores the last W rows of the first module's inputs for the next step.

    draft_input_ids: [T or more] int32; draft_input_hidden_states: [T or more, hidden_size]
    cached_draft_input_ids: [R + 1, W] int64; cached_target_hidden_states: [R + 1, W, hidden_size];
                            both in place
    last_token_indices:     [B] int64
    """
    assert not USE_INPUT_EMBEDS, IMAGES
    num_reqs, width = idx_mapping.shape[0], num_speculative_steps - 1
    back = torch.arange(1 - width, 1, device=idx_mapping.device, dtype=torch.int64)
    places = last_token_indices.unsqueeze(1) + back
    is_row = places >= query_start_loc[:num_reqs].unsqueeze(1)
    index = places.clamp_(min=0).view(-1)
    spare = cached_draft_input_ids.shape[0] - 1
    slots = torch.where(idx_mapping < 0, spare, idx_mapping)

    tables = [
        (cached_draft_input_ids, draft_input_ids),
        (cached_target_hidden_states, draft_input_hidden_states),
    ]
    for table, rows in tables:
        newest = rows.index_select(0, index).view(num_reqs, width, *rows.shape[1:]).to(table.dtype)
        stored = table.index_select(0, slots)
        is_new = is_row.view(num_reqs, width, *[1] * (rows.dim() - 1))
        table.index_copy_(0, slots, torch.where(is_new, newest, stored))


def shift_input_ids(
    input_ids: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    last_token_indices: torch.Tensor,
    draft_tokens: torch.Tensor,
    **_: Any,
) -> None:
    """Writes a later module's tokens: shifted by one row, with the draft in the last row.

    Rows after the last one shift too, but nothing reads them.
    input_ids: [T or more] int32, in place; draft_tokens: [B] int64
    """
    input_ids[:-1].copy_(input_ids[1:].clone())
    # A padded request has no row of its own, so that the buffer's last row is free.
    places = torch.where(idx_mapping < 0, input_ids.shape[0] - 1, last_token_indices)
    input_ids.index_copy_(0, places, draft_tokens.to(input_ids.dtype))
