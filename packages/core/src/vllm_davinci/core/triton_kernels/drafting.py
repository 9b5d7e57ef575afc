"""Drafter inputs with torch operators.

Stand-ins for kernels of vLLM's V2 runner (v1/worker/gpu/spec_decode/{target_dependent_ar,
standalone_ar,ngram,dflash}/speculator.py), with the same parameters without `_ptr`. Nothing here
reads from the device. Shapes: B requests of the step, T rows of the target's step, K drafts, R
slots of requests.
"""

from typing import Any

import torch

from vllm_davinci.core.triton_kernels.inputs import following, request_of


def prepare_prefill_inputs(
    last_token_indices: torch.Tensor,
    draft_current_step: torch.Tensor,
    draft_input_ids: torch.Tensor,
    draft_positions: torch.Tensor,
    draft_query_start_loc: torch.Tensor,
    draft_seq_lens: torch.Tensor,
    target_input_ids: torch.Tensor,
    target_positions: torch.Tensor,
    idx_mapping: torch.Tensor,
    last_sampled: torch.Tensor,
    next_prefill_tokens: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    max_num_reqs: int,
    **_: Any,
) -> None:
    """Writes the inputs of the first pass of a drafter that reads the target's hidden states.

    They are the rows of the target's step, each with the next row's token; the last accepted row
    gets the newest token. Rows of rejected drafts stay unchanged.

    last_token_indices: [R] int64, the last accepted row of each request; then 0
    draft_current_step: int64, set to 0
    draft_input_ids:    [T or more] int32; draft_positions: likewise, int64
    draft_query_start_loc: [R + 1] int32, as in the target's step, then the end
    draft_seq_lens:     [R] int32, as in the target's step, then 0
    last_sampled:       [R, 1] int64; next_prefill_tokens: [lookahead, R] int32, of prompts
    """
    num_reqs, num_rows = idx_mapping.shape[0], target_input_ids.shape[0]
    ends = query_start_loc[1 : num_reqs + 1]
    last = ends - 1 - num_rejected[:num_reqs]
    newest = last_sampled.view(-1).index_select(0, idx_mapping)
    of_prompt = next_prefill_tokens[0].index_select(0, idx_mapping)
    is_sampled = num_sampled[:num_reqs] > 0
    tokens = torch.where(is_sampled, newest.to(torch.int32), of_prompt.to(torch.int32))

    rows = torch.arange(num_rows, device=ends.device, dtype=torch.int64)
    request = request_of(ends, num_rows)
    beyond = rows - last.index_select(0, request)
    ids, positions = draft_input_ids[:num_rows], draft_positions[:num_rows]
    shifted = following(target_input_ids)
    ids.copy_(
        torch.where(
            beyond < 0, shifted, torch.where(beyond == 0, tokens.index_select(0, request), ids)
        )
    )
    positions.copy_(torch.where(beyond < 1, target_positions, positions))

    draft_query_start_loc[:num_reqs].copy_(query_start_loc[:num_reqs])
    draft_query_start_loc[num_reqs : max_num_reqs + 1].copy_(
        ends[-1:].expand(max_num_reqs + 1 - num_reqs)
    )
    draft_seq_lens[:num_reqs].copy_(seq_lens[:num_reqs])
    draft_seq_lens[num_reqs:max_num_reqs].zero_()
    last_token_indices[:num_reqs].copy_(last)
    last_token_indices[num_reqs:max_num_reqs].zero_()
    draft_current_step.zero_()


def prepare_decode_inputs(
    draft_tokens: torch.Tensor,
    draft_tokens_stride: int,
    target_seq_lens: torch.Tensor,
    num_rejected: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    sample_src_positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    max_model_len: int,
    max_num_reqs: int,
    ADVANCE_DRAFT_POSITIONS: bool = True,
    **_: Any,
) -> None:
    """Writes the inputs of a drafter's second pass: one token per request, the first draft.

    draft_tokens:    [B] int64, the first drafts
    target_seq_lens: [B or more] int32, rejected rows included
    input_ids, positions, sample_src_positions, seq_lens: [R], in place; seq_lens 0 after B
    query_start_loc: [R + 1] int32
    """
    num_reqs = draft_tokens.shape[0]
    input_ids[:num_reqs].copy_(draft_tokens)
    sample_src_positions[:num_reqs].add_(1)
    lengths = target_seq_lens[:num_reqs] - num_rejected[:num_reqs]
    if ADVANCE_DRAFT_POSITIONS:
        positions[:num_reqs].add_(1).clamp_(max=max_model_len - 1)
        lengths = (lengths + 1).clamp_(max=max_model_len)
    seq_lens[:num_reqs].copy_(lengths)
    seq_lens[num_reqs:max_num_reqs].zero_()
    numbers = torch.arange(max_num_reqs + 1, device=query_start_loc.device, dtype=torch.int32)
    query_start_loc[: max_num_reqs + 1].copy_(numbers.clamp_(max=num_reqs))


def update_draft_inputs(
    output_draft_tokens: torch.Tensor,
    output_draft_tokens_stride: int,
    next_input_hidden_states: torch.Tensor,
    next_input_hidden_states_stride: int,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    sample_src_positions: torch.Tensor,
    seq_lens: torch.Tensor,
    draft_tokens: torch.Tensor,
    current_draft_step: torch.Tensor,
    hidden_states: torch.Tensor,
    hidden_states_stride: int,
    hidden_size: int,
    max_model_len: int,
    num_speculative_steps: int,
    ADVANCE_DRAFT_POSITIONS: bool = True,
    **_: Any,
) -> None:
    """Stores a pass's drafts [B] int64 in their column, and as inputs of the next pass.

    The last pass stores them as inputs, too, although nothing reads them.

    output_draft_tokens: [R, K] int64, in place at column `current_draft_step` (int64 on the device)
    next_input_hidden_states: [T, hidden_size], B rows; hidden_states: [B or more, hidden_size]
    """
    num_reqs = draft_tokens.shape[0]
    column = current_draft_step.view(1)
    output_draft_tokens[:num_reqs].index_copy_(1, column, draft_tokens.unsqueeze(1))
    sample_src_positions[:num_reqs].add_(1)
    input_ids[:num_reqs].copy_(draft_tokens)
    next_input_hidden_states[:num_reqs].copy_(hidden_states[:num_reqs])
    if ADVANCE_DRAFT_POSITIONS:
        positions[:num_reqs].add_(1).clamp_(max=max_model_len - 1)
        seq_lens[:num_reqs].add_(1).clamp_(max=max_model_len)


def with_new_tokens(
    target_input_ids: torch.Tensor,
    target_positions: torch.Tensor,
    last_sampled: torch.Tensor,
    idx_mapping: torch.Tensor,
    out_input_ids: torch.Tensor,
    out_positions: torch.Tensor,
    last_token_indices: torch.Tensor,
    out_query_start_loc: torch.Tensor,
    out_seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    num_rejected: torch.Tensor,
    max_num_reqs: int,
    max_model_len: int,
    **_: Any,
) -> None:
    """Writes a draft model's first inputs: the target's rows and one more per request.

    The new token follows the accepted rows; rows after it have token 0, whose keys and values the
    next steps overwrite.

    out_input_ids: [T + B or more] int32; out_positions: likewise, int64
    last_token_indices: [R] int64, the rows of the new tokens; then 0
    out_query_start_loc: [R + 1] int32; out_seq_lens: [R] int32, then 0
    """
    num_reqs, num_target = idx_mapping.shape[0], target_input_ids.shape[0]
    starts, ends = query_start_loc[:num_reqs], query_start_loc[1 : num_reqs + 1]
    numbers = torch.arange(num_reqs + 1, device=starts.device, dtype=torch.int32)
    out_starts, out_ends = starts + numbers[:-1], ends + numbers[1:]
    num_valid = ends - starts - num_rejected[:num_reqs]
    tokens = last_sampled.view(-1).index_select(0, idx_mapping).to(torch.int32)
    first = target_positions.index_select(0, starts.to(torch.int64))

    num_rows = min(num_target + num_reqs, out_input_ids.shape[0])
    rows = torch.arange(num_rows, device=starts.device, dtype=torch.int64)
    request = request_of(out_ends, num_rows)
    number = rows - out_starts.index_select(0, request)
    behind = number - num_valid.index_select(0, request)
    source = (number + starts.index_select(0, request)).clamp_(max=num_target - 1)
    ids = target_input_ids.index_select(0, source) * (behind < 0)
    ids = torch.where(behind == 0, tokens.index_select(0, request), ids)
    positions = (number + first.index_select(0, request)).clamp_(max=max_model_len - 1)
    is_row = rows < out_ends[-1]
    for values, out in ((ids, out_input_ids), (positions, out_positions)):
        out[:num_rows].copy_(torch.where(is_row, values, out[:num_rows]))

    last_token_indices[:num_reqs].copy_(out_starts + num_valid)
    last_token_indices[num_reqs:max_num_reqs].zero_()
    out_query_start_loc[:num_reqs].copy_(out_starts)
    out_query_start_loc[num_reqs : max_num_reqs + 1].copy_(
        out_ends[-1:].expand(max_num_reqs + 1 - num_reqs)
    )
    out_seq_lens[:num_reqs].copy_((seq_lens[:num_reqs] + 1).clamp_(max=max_model_len))
    out_seq_lens[num_reqs:max_num_reqs].zero_()


def prepare_block_inputs(
    out_input_ids: torch.Tensor,
    out_query_positions: torch.Tensor,
    out_is_padding: torch.Tensor,
    out_query_start_loc: torch.Tensor,
    out_seq_lens: torch.Tensor,
    out_query_slot_mapping: torch.Tensor,
    out_context_positions: torch.Tensor,
    out_context_slot_mapping: torch.Tensor,
    out_sample_indices: torch.Tensor,
    out_sample_pos: torch.Tensor,
    out_sample_idx_mapping: torch.Tensor,
    out_temperature: torch.Tensor,
    out_seeds: torch.Tensor,
    target_positions: torch.Tensor,
    target_query_start_loc: torch.Tensor,
    idx_mapping: torch.Tensor,
    last_sampled: torch.Tensor,
    next_prefill_tokens: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    block_table: torch.Tensor,
    block_table_stride: int,
    parallel_drafting_token_id: int,
    block_size: int,
    num_query_per_req: int,
    num_speculative_steps: int,
    max_num_reqs: int,
    max_num_tokens: int,
    max_model_len: int,
    cp_rank: int,
    SAMPLE_FROM_ANCHOR: bool,
    PAD_SLOT_ID: int,
    CP_SIZE: int,
    **_: Any,
) -> None:
    """Writes the inputs that draft a block, and where the target's rows before it are stored.

    A request has Q rows: its newest token, then `parallel_drafting_token_id`. Rows of rejected
    drafts have position 0 and no slot, nor has a row whose block is block 0.

    out_input_ids: [max_num_tokens] int32; out_query_positions: likewise, int64; then 0
    out_context_positions, out_context_slot_mapping: [T or more] int64, of the target's rows
    out_sample_indices, out_sample_pos, out_sample_idx_mapping: [R * K] int64, then 0, 0 and -1
    block_table: [B or more, blocks] int32
    """
    assert CP_SIZE == 1
    num_reqs, num_query = idx_mapping.shape[0], num_query_per_req
    device = idx_mapping.device
    ends = target_query_start_loc[1 : num_reqs + 1]
    valid_ends = ends - num_rejected[:num_reqs]
    before = target_positions.index_select(0, (valid_ends - 1).to(torch.int64))

    table = (block_table, block_table_stride, block_size, PAD_SLOT_ID)
    num_rows = target_positions.shape[0]
    rows = torch.arange(num_rows, device=device, dtype=torch.int64)
    request = request_of(ends, num_rows)
    is_valid = rows < valid_ends.index_select(0, request)
    positions = target_positions * is_valid
    out_context_positions[:num_rows].copy_(positions)
    out_context_slot_mapping[:num_rows].copy_(
        torch.where(is_valid, _slots(request, positions, *table), PAD_SLOT_ID)
    )

    offsets = torch.arange(num_query, device=device, dtype=torch.int64)
    positions = before.unsqueeze(1) + (offsets + 1)
    newest = last_sampled.view(-1).index_select(0, idx_mapping).to(torch.int32)
    of_prompt = next_prefill_tokens.view(-1).index_select(0, idx_mapping).to(torch.int32)
    newest = torch.where(num_sampled[:num_reqs] > 0, newest, of_prompt).unsqueeze(1)
    ids = torch.where(offsets == 0, newest, parallel_drafting_token_id)
    requests = torch.arange(num_reqs, device=device, dtype=torch.int64).unsqueeze(1)
    num_queries = num_reqs * num_query
    for out, values, rest in (
        (out_input_ids, ids, 0),
        (out_query_positions, positions.clamp(max=max_model_len - 1), 0),
        (out_is_padding, torch.zeros_like(ids), 1),
        (out_query_slot_mapping, _slots(requests, positions, *table), PAD_SLOT_ID),
    ):
        out[:num_queries].copy_(values.view(-1))
        out[num_queries:max_num_tokens].fill_(rest)

    skipped = 0 if SAMPLE_FROM_ANCHOR else 1
    num_samples = num_reqs * num_speculative_steps
    sampled = requests * num_query + offsets
    for out, values, rest in (
        (out_sample_indices, sampled[:, skipped:], 0),
        (out_sample_pos, positions[:, skipped:] + (1 - skipped), 0),
        (out_sample_idx_mapping, idx_mapping.unsqueeze(1).expand_as(sampled)[:, skipped:], -1),
    ):
        out[:num_samples].copy_(values.reshape(-1))
        out[num_samples : max_num_reqs * num_speculative_steps].fill_(rest)

    numbers = torch.arange(max_num_reqs + 1, device=device, dtype=torch.int32)
    out_query_start_loc[: max_num_reqs + 1].copy_(numbers.clamp_(max=num_reqs) * num_query)
    out_seq_lens[:num_reqs].copy_((before + (1 + num_query)).clamp_(max=max_model_len))
    out_seq_lens[num_reqs:max_num_reqs].zero_()
    for out, given in ((out_temperature, temperature), (out_seeds, seeds)):
        out.index_copy_(0, idx_mapping.to(torch.int64), given.index_select(0, idx_mapping))


def _slots(
    requests: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    stride: int,
    block_size: int,
    pad: int,
) -> torch.Tensor:
    """Cache slots of positions, int64; `pad` for those in block 0."""
    places = requests * stride + (positions // block_size).clamp_(max=stride - 1)
    found = block_table.reshape(-1).index_select(0, places.view(-1)).to(torch.int64)
    found = found.view_as(positions)
    return torch.where(found == 0, pad, found * block_size + positions % block_size)


def ngram_scan(
    token_ids: torch.Tensor,
    token_ids_stride: int,
    idx_mapping: torch.Tensor,
    total_len: torch.Tensor,
    num_sampled: torch.Tensor,
    scratch: torch.Tensor,
    scratch_stride: int,
    L: int,
    MIN_N: int,
    MAX_N: int,
    MAX_N_PO2: int = 0,
    BLOCK_L: int = 0,
    **_: Any,
) -> None:
    """Finds the last earlier occurrence of the longest repeated n-gram at a request's end.

    token_ids: [R, longest request] int32; total_len: [R] int32; num_sampled: [B] int32
    scratch:   [B or more, blocks] int64, written: n * (L + 1) + place + 1, or 0, in column 0
    L:         longest request; MIN_N, MAX_N: lengths of an n-gram
    """
    num_reqs, longest = idx_mapping.shape[0], token_ids.shape[1]
    tokens = token_ids.index_select(0, idx_mapping)
    length = total_len.index_select(0, idx_mapping).to(torch.int64).unsqueeze(1)
    is_asked = (num_sampled[:num_reqs] > 0).unsqueeze(1)
    last = torch.arange(longest, device=token_ids.device, dtype=torch.int64)
    matches = is_asked & (last < length - 1)
    best = torch.zeros((num_reqs, longest), dtype=torch.int64, device=token_ids.device)
    for number in range(1, MAX_N + 1):  # matching tokens, backwards from each position
        place = (length - number).clamp(min=0)
        back = torch.nn.functional.pad(tokens[:, : longest - number + 1], (number - 1, 0))
        matches = matches & (back == tokens.gather(1, place)) & (last >= number - 1)
        matches = matches & (length > number)
        if number >= MIN_N:
            score = last + (number * (L + 1) + 2 - number)
            best = torch.where(matches, score, best)
    scratch[:num_reqs].zero_()
    scratch[:num_reqs, 0].copy_(best.amax(dim=1))


def ngram_finalize(
    token_ids: torch.Tensor,
    token_ids_stride: int,
    idx_mapping: torch.Tensor,
    total_len: torch.Tensor,
    num_sampled: torch.Tensor,
    last_sampled: torch.Tensor,
    scratch: torch.Tensor,
    scratch_stride: int,
    drafts: torch.Tensor,
    L: int,
    N_BLOCKS: int,
    K: int,
    K_PO2: int = 0,
    N_BLOCKS_PO2: int = 0,
    **_: Any,
) -> None:
    """Writes the tokens that followed the n-gram; without one, the newest token K times.

    last_sampled: [R] int64; drafts: [B or more, K] int64, written; others: see `ngram_scan`
    """
    num_reqs = idx_mapping.shape[0]
    score = scratch[:num_reqs].amax(dim=1, keepdim=True)
    is_found = (score > 0) & (num_sampled[:num_reqs] > 0).unsqueeze(1)
    number = torch.div(score - 1, L + 1, rounding_mode="floor")
    start = ((score - 1) - number * (L + 1) + number) * is_found
    places = start + torch.arange(K, device=score.device, dtype=torch.int64)
    length = total_len.index_select(0, idx_mapping).unsqueeze(1)
    is_there = is_found & (places < length)
    places = idx_mapping.unsqueeze(1) * token_ids_stride + places.clamp(max=L - 1)
    tokens = token_ids.view(-1).index_select(0, places.view(-1)).view(places.shape)
    newest = last_sampled.index_select(0, idx_mapping).unsqueeze(1)
    drafts[:num_reqs].copy_(torch.where(is_there, tokens.to(torch.int64), newest))
