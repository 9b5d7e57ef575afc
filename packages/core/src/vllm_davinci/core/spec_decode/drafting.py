"""Drafter inputs with torch operators: stand-ins for vLLM's kernels between draft passes.

vLLM calls them with device tensors, and nothing here reads from the device. Parameters have the
order of vLLM's kernels (v1/spec_decode/utils.py), and results are equal.
"""

import torch

REJECTED = -1  # in the sampled tokens, after the accepted ones


def next_tokens(
    sampled: torch.Tensor,
    is_discarded: torch.Tensor,
    known: torch.Tensor,
    next_token: torch.Tensor,
    counts: torch.Tensor,
    vocabulary: int,
    num_sampled: int,
    num_requests: int,
    stride: int,
    block_size: int,
) -> None:
    """Writes each request's newest token, and its number of tokens in this step.

    sampled:      [num_requests, num_sampled], REJECTED after the accepted ones
    is_discarded: [num_requests or more], requests still in their prompt
    known:        [num_requests or more], the host's token for requests that sampled none
    next_token, counts: [num_requests], written in place
    """
    sampled = sampled[:num_requests]
    is_token = (sampled != REJECTED) & (sampled < vocabulary)
    is_token &= ~is_discarded[:num_requests].unsqueeze(1)
    counts.copy_(is_token.sum(dim=1))
    columns = torch.arange(num_sampled, device=sampled.device)
    last = (columns * is_token).amax(dim=1, keepdim=True)
    newest = sampled.gather(1, last).squeeze(1)
    next_token.copy_(torch.where(counts > 0, newest, known[:num_requests]))


def places_to_sample(
    ends: torch.Tensor,
    counts: torch.Tensor,
    query_start_loc: torch.Tensor,
    places: torch.Tensor,
    num_rejected: torch.Tensor,
    num_requests: int,
) -> None:
    """Writes the row of each request's newest token, and its number of rejected drafts.

    ends:            [num_requests], ends of each request's drafts among all
    counts:          [num_requests], its number of tokens
    query_start_loc: [num_requests + 1]
    places, num_rejected: [num_requests], written in place
    """
    begins = torch.zeros_like(ends)
    begins[1:] = ends[:-1]
    num_drafts = (ends - begins)[:num_requests]
    num_rejected.copy_(torch.where(num_drafts > 0, num_drafts + 1 - counts[:num_requests], 0))
    places.copy_(query_start_loc[1 : num_requests + 1] - 1 - num_rejected)


def next_positions(
    positions: torch.Tensor,
    block_table: torch.Tensor,
    stride: int,
    seq_lens: torch.Tensor,
    moved: torch.Tensor,
    slots: torch.Tensor,
    block_size: int,
    max_model_len: int,
    num_blocks: int,
    no_slot: int,
    num_requests: int,
) -> None:
    """Advances each request by one token: position, length and cache slot.

    positions: [num_requests]; block_table: [num_requests, num_blocks]
    seq_lens:  [num_requests], in place; moved: [num_requests], the new positions
    slots:     [rows], rows after the requests are padding and get `no_slot`
    A request at the model's maximum length continues at position 0 without a slot.
    """
    new = positions + 1
    is_beyond = new >= max_model_len
    new = new.masked_fill(is_beyond, 0)
    number = new // block_size
    column = number.clamp(max=num_blocks - 1).to(torch.int64).unsqueeze(1)
    blocks = block_table[:num_requests].gather(1, column).squeeze(1)
    own = (blocks - number).to(slots.dtype) * block_size + new
    if slots.shape[0] > num_requests:
        slots[num_requests:].fill_(no_slot)
    slots[:num_requests].copy_(own.masked_fill(is_beyond, no_slot))
    lengths = (seq_lens[:num_requests] + 1).masked_fill(is_beyond, 1)
    seq_lens[:num_requests].copy_(lengths.clamp(max=max_model_len))
    moved.copy_(new)


def with_new_tokens(
    tokens: torch.Tensor,
    positions: torch.Tensor,
    next_token: torch.Tensor,
    out_tokens: torch.Tensor,
    out_positions: torch.Tensor,
    is_rejected: torch.Tensor,
    is_masked: torch.Tensor,
    new_places: torch.Tensor,
    hidden_places: torch.Tensor,
    query_start_loc: torch.Tensor,
    last_places: torch.Tensor,
    padding_token: int,
    mask_token: int,
    num_tokens: int,
    num_new: int,
    shifts: bool,
    block_size: int,
) -> None:
    """Copies each request's accepted tokens and appends its newest token and mask tokens.

    tokens, positions: [num_tokens] of the target's step
    out_tokens, out_positions, is_rejected, is_masked: the drafter's rows, written in place
    new_places:        [num_requests * num_new], rows of the newest token and of the mask tokens
    hidden_places:     [num_tokens], the row of each of the target's hidden states
    query_start_loc:   [num_requests + 1]; last_places: [num_requests], the last accepted row
    shifts:            whether a request's first token is dropped, so that it has one row fewer
    """
    num_requests = last_places.shape[0]
    extra = num_new - 1 if shifts else num_new
    total = num_tokens + num_requests * extra
    starts = query_start_loc[:num_requests].to(torch.int64)
    requests = torch.arange(num_requests, device=starts.device)
    begins = starts + requests * extra  # per row, of its request
    num_kept = last_places.to(torch.int64) - starts + (0 if shifts else 1)

    rows = torch.arange(total, device=starts.device)
    of_row = (rows.unsqueeze(1) >= begins).sum(dim=1) - 1
    place = rows - begins[of_row]
    kept = num_kept[of_row]
    is_copied, is_newest = place < kept, place == kept
    masked = (place > kept) & (place < kept + num_new)
    rejected = place >= kept + num_new
    source = (starts[of_row] + place + (1 if shifts else 0)).clamp(max=num_tokens - 1)
    values = torch.where(is_copied, tokens[source], padding_token)
    values = torch.where(is_newest, next_token[of_row].to(values.dtype), values)
    values = values.masked_fill(masked, mask_token)
    out_tokens[:total].copy_(values)
    first = positions[starts][of_row]
    out_positions[:total].copy_((first + place).masked_fill(rejected, 0))
    is_rejected[:total].copy_(rejected)
    is_masked[:total].copy_(masked)
    offsets = torch.arange(num_new, device=starts.device)
    new_places.copy_(((begins + num_kept).unsqueeze(1) + offsets).flatten())
    if shifts:
        inputs = torch.arange(num_tokens, device=starts.device)
        of_input = (inputs.unsqueeze(1) >= starts).sum(dim=1) - 1
        hidden_places.copy_(begins[of_input] + inputs - starts[of_input])
