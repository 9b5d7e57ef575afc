"""Verification of drafts, with torch operators.

Stand-ins for kernels of vLLM's V2 runner (v1/worker/gpu/spec_decode/{rejection_sampler,
rejection_sampler_utils}.py), with the same parameters without `_ptr`. Nothing here reads from the
device. Shapes: B requests of the step, L rows of logits, V entries of the vocabulary, K drafts, R
slots of requests.

cu_num_logits: [B + 1] int32, the first row of logits of each request, then the end
draft_sampled: [L] int32, the token of each row: after a request's first row, its drafts
"""

from typing import Any

import torch

from vllm_davinci.core.triton_kernels.inputs import following, request_of
from vllm_davinci.core.triton_kernels.sampling import gumbel_noise, log1p_of_negative, token_hashes

# Domain of the hash that decides acceptance: its noise differs from every token's.
VERIFICATION = 0x51ED270B


def flatten_sampled(
    flat_sampled: torch.Tensor,
    sampled: torch.Tensor,
    sampled_stride: int,
    num_sampled: torch.Tensor,
    cu_num_logits: torch.Tensor,
    **_: Any,
) -> None:
    """Writes each request's tokens to its rows: [L] int64, in place; the others stay.

    sampled: [B, K + 1] int64; num_sampled: [B] int32
    """
    num_reqs, num_rows = num_sampled.shape[0], flat_sampled.shape[0]
    request = request_of(cu_num_logits[1 : num_reqs + 1], num_rows)
    rows = torch.arange(num_rows, device=request.device, dtype=torch.int64)
    number = rows - cu_num_logits.index_select(0, request)
    places = request * sampled_stride + number.clamp(max=sampled.shape[1] - 1)
    tokens = sampled.view(-1).index_select(0, places)
    is_token = number < num_sampled.index_select(0, request)
    flat_sampled.copy_(torch.where(is_token, tokens, flat_sampled))


def gather_draft_sampled(
    draft_sampled: torch.Tensor,
    pos: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    logits_indices: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    prefill_len: torch.Tensor,
    num_logits: int,
    **_: Any,
) -> None:
    """Writes token and position of each row of logits: [L] int32 and int64.

    In a step that begins in the prompt, drafts are placeholders with token -1.

    expanded_idx_mapping: [L] int64, the row's slot; expanded_local_pos: [L] int32, its index there
    """
    tokens = input_ids.index_select(0, logits_indices)
    pos.copy_(positions.index_select(0, logits_indices))
    prompt = prefill_len.index_select(0, expanded_idx_mapping)
    is_placeholder = (expanded_local_pos > 0) & (pos - expanded_local_pos < prompt)
    draft_sampled.copy_(tokens.masked_fill(is_placeholder, -1))


def local_logits_stats(
    target_local_argmax: torch.Tensor,
    target_local_argmax_stride: int,
    target_local_max: torch.Tensor,
    target_local_max_stride: int,
    target_local_sumexp: torch.Tensor,
    target_local_sumexp_stride: int,
    draft_local_max: torch.Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp: torch.Tensor,
    draft_local_sumexp_stride: int,
    target_logits: torch.Tensor,
    target_logits_stride: int,
    draft_logits: torch.Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    temp: torch.Tensor,
    vocab_size: int,
    num_logits: int,
    **_: Any,
) -> None:
    """Writes verification's inputs for each row: argmax, maximum, and sum of exponentials.

    vLLM combines blocks of the vocabulary; here the first block stands for the whole row.

    *_local_*:     [L, blocks], int64 the argmax, fp32 the others
    target_logits: [L, V], any float; draft_logits: [R, K, V] before the temperature, or None
    temp:          [R] fp32
    """
    values = target_logits[:, :vocab_size].to(torch.float32)
    argmax = values.argmax(dim=1, keepdim=True)
    target_local_argmax[:, :1].copy_(argmax)
    _write_stats(target_local_max, target_local_sumexp, values, values.gather(1, argmax))
    if draft_logits is None:
        return
    most = draft_logits.shape[1] - 1  # the row after the last draft has no draft of its own
    places = expanded_idx_mapping * (most + 1) + expanded_local_pos.clamp(max=most)
    of_drafter = draft_logits.view(-1, draft_logits.shape[2]).index_select(0, places)
    values = of_drafter[:, :vocab_size].to(torch.float32)
    values = values / _temperatures(temp, expanded_idx_mapping).unsqueeze(1)
    _write_stats(draft_local_max, draft_local_sumexp, values, values.amax(dim=1, keepdim=True))


def _write_stats(
    local_max: torch.Tensor, local_sumexp: torch.Tensor, values: torch.Tensor, maximum: torch.Tensor
) -> None:
    local_max.fill_(-torch.inf)
    local_max[:, :1].copy_(maximum)
    local_sumexp.zero_()
    local_sumexp[:, :1].copy_((values - maximum).exp().sum(dim=1, keepdim=True))


def _temperatures(temp: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The temperature of each slot; 1 instead of 0."""
    of_slot = temp.index_select(0, slots)
    return of_slot.masked_fill(of_slot == 0, 1.0)


def _log_sums(local_max: torch.Tensor, local_sumexp: torch.Tensor) -> torch.Tensor:
    """Returns the log-sum-exp of each row, from its parts: [L] fp32."""
    maximum = local_max.amax(dim=1, keepdim=True)
    total = (local_sumexp * (local_max - maximum).exp()).sum(dim=1)
    return maximum.squeeze(1) + total.log_()


def reject(
    sampled: torch.Tensor,
    sampled_stride: int,
    rejected_steps: torch.Tensor,
    target_rejected_logsumexp: torch.Tensor,
    draft_rejected_logsumexp: torch.Tensor,
    target_logits: torch.Tensor,
    target_logits_stride: int,
    target_local_argmax: torch.Tensor,
    target_local_argmax_stride: int,
    target_local_max: torch.Tensor,
    target_local_max_stride: int,
    target_local_sumexp: torch.Tensor,
    target_local_sumexp_stride: int,
    draft_sampled: torch.Tensor,
    draft_logits: torch.Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_local_max: torch.Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp: torch.Tensor,
    draft_local_sumexp_stride: int,
    cu_num_logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    temp: torch.Tensor,
    seed: torch.Tensor,
    pos: torch.Tensor,
    synthetic_conditional_rates: torch.Tensor | None,
    cumulative_log_p: torch.Tensor | None,
    local_residual_mass: torch.Tensor | None,
    local_residual_mass_stride: int,
    fly_entropy: torch.Tensor | None,
    fly_entropy_threshold: float,
    vocab_num_blocks: int,
    USE_BLOCK_VERIFICATION: bool = False,
    FLY_WINDOW_SIZE: int = 0,
    **_: Any,
) -> None:
    """Accepts drafts up to the first rejected one, and appends the greedy token.

    A greedy request accepts a draft that is its argmax; other requests accept it with probability p
    / q, target over drafter, where q is 1 without `draft_logits`. Synthetic rates, if given, decide
    instead.

    sampled:        [B, K + 1] int64, written as far as drafts are accepted
    rejected_steps: [B] int32, number of accepted drafts
    *_rejected_logsumexp: [B] fp32, of the rejected row
    seed: [R] int64; pos: [L] int64; synthetic_conditional_rates: [K] fp32
    """
    assert not USE_BLOCK_VERIFICATION and FLY_WINDOW_SIZE == 0, "refused at the start"
    num_reqs, num_rows = idx_mapping.shape[0], target_logits.shape[0]
    most = sampled.shape[1] - 1
    starts, ends = cu_num_logits[:num_reqs], cu_num_logits[1 : num_reqs + 1]
    number = torch.arange(most, device=starts.device, dtype=torch.int64)
    row = (starts.unsqueeze(1) + number).clamp(max=num_rows - 1)
    is_draft = number < (ends - starts - 1).unsqueeze(1)

    drafted = following(draft_sampled).to(torch.int64)  # [L], the draft that a row decides on
    is_valid = drafted >= 0
    drafted = drafted.clamp(min=0)
    best_block = target_local_max.argmax(dim=1, keepdim=True)
    argmax = target_local_argmax.gather(1, best_block).squeeze(1)
    target_lse = _log_sums(target_local_max, target_local_sumexp)
    log_p = target_logits.gather(1, drafted.unsqueeze(1)).squeeze(1).to(torch.float32) - target_lse

    slot_of_row = idx_mapping.index_select(0, request_of(ends, num_rows))
    is_greedy = temp.index_select(0, slot_of_row) == 0
    hashed = token_hashes(seed.index_select(0, slot_of_row), pos, 1, VERIFICATION).squeeze(1)
    uniform = (hashed.to(torch.float32) + 0.5) * 2.0**-32
    draft_lse = torch.zeros_like(target_lse)
    log_q = draft_lse
    if draft_logits is not None:
        draft_lse = _log_sums(draft_local_max, draft_local_sumexp)
        rows = torch.arange(num_rows, device=starts.device, dtype=torch.int64)
        place = rows - starts.index_select(0, request_of(ends, num_rows))
        place = slot_of_row * draft_logits_stride_0 + place.clamp(max=most - 1) * (
            draft_logits_stride_1
        )
        logit = draft_logits.view(-1).index_select(0, place + drafted).to(torch.float32)
        log_q = logit / _temperatures(temp, slot_of_row) - draft_lse
    if synthetic_conditional_rates is not None:
        rows = torch.arange(num_rows, device=starts.device, dtype=torch.int64)
        place = (rows - starts.index_select(0, request_of(ends, num_rows))).clamp(max=most - 1)
        is_kept = uniform < synthetic_conditional_rates.index_select(0, place)
    else:
        is_kept = torch.where(is_greedy, argmax == drafted, log_p > uniform.log_() + log_q)
    is_kept = is_kept & is_valid
    token = torch.where(is_greedy & ~is_kept, argmax, drafted)

    flat = row.view(-1)
    is_lost = ~(is_draft & is_kept.index_select(0, flat).view(row.shape))
    kept = (is_lost.to(torch.int32).cumsum(dim=1) == 0).sum(dim=1)
    sampled[:, :most].copy_(token.index_select(0, flat).view(row.shape))
    rejected_steps.copy_(kept)
    rejected_row = (starts + kept).to(torch.int64)
    target_rejected_logsumexp.copy_(target_lse.index_select(0, rejected_row))
    draft_rejected_logsumexp.copy_(draft_lse.index_select(0, rejected_row))


def resample(
    resampled_local_argmax: torch.Tensor,
    resampled_local_argmax_stride: int,
    resampled_local_max: torch.Tensor,
    resampled_local_max_stride: int,
    target_logits: torch.Tensor,
    target_logits_stride: int,
    target_rejected_logsumexp: torch.Tensor,
    draft_logits: torch.Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_rejected_logsumexp: torch.Tensor,
    rejected_step: torch.Tensor,
    cu_num_logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    draft_sampled: torch.Tensor,
    temp: torch.Tensor,
    seed: torch.Tensor,
    pos: torch.Tensor,
    cumulative_log_p: torch.Tensor | None,
    contexts: torch.Tensor | None,
    contexts_stride: int,
    watermarking: torch.Tensor | None,
    watermarking_skip_mask: torch.Tensor | None,
    watermark_key_0: int,
    watermark_key_1: int,
    vocab_size: int,
    USE_FP64: bool = False,
    **_: Any,
) -> None:
    """Draws the token after the accepted drafts, from the residual distribution.

    The distribution is max(p - q, 0) if a draft was rejected (without `draft_logits`: p without the
    draft), and p if all were accepted or the next one is a placeholder.

    resampled_local_argmax, resampled_local_max: [B, blocks]; the first block stands for the row
    rejected_step: [B] int32, number of accepted drafts; others: see `reject`
    """
    num_rows, num_reqs = target_logits.shape[0], rejected_step.shape[0]
    row = (cu_num_logits[:num_reqs] + rejected_step).to(torch.int64)
    is_bonus = row == cu_num_logits[1 : num_reqs + 1] - 1
    slot = expanded_idx_mapping.index_select(0, row)
    of_request = temp.index_select(0, slot).unsqueeze(1)
    rejected = draft_sampled.index_select(0, (row + 1).clamp(max=num_rows - 1)).to(torch.int64)
    is_residual = (~is_bonus & (rejected >= 0)).unsqueeze(1)

    values = target_logits.index_select(0, row)[:, :vocab_size].to(torch.float32)
    if draft_logits is None:
        token = rejected.clamp(min=0).unsqueeze(1)
        left = values.gather(1, token).masked_fill(is_residual, -torch.inf)
        values = values.scatter(1, token, left)
    else:
        most = draft_logits.shape[1]
        place = slot * most + rejected_step.clamp(max=most - 1)
        drafter = draft_logits.view(-1, draft_logits.shape[2]).index_select(0, place)
        drafter = drafter[:, :vocab_size].to(torch.float32)
        drafter = drafter / of_request.masked_fill(of_request == 0, 1.0)
        log_p = values - target_rejected_logsumexp.unsqueeze(1)
        ratio = (drafter - draft_rejected_logsumexp.unsqueeze(1) - log_p).exp()
        left = log_p + log1p_of_negative(ratio.clamp(max=1.0))
        left = left.masked_fill(ratio >= 1.0, -torch.inf)
        values = torch.where(is_residual, left, values)
    if USE_FP64:
        values = values.to(torch.float64)
    noise = gumbel_noise(seed.index_select(0, slot), pos.index_select(0, row), vocab_size, USE_FP64)
    values = torch.where(of_request == 0, values, values + noise)
    resampled_local_argmax[:, :1].copy_(values.argmax(dim=1, keepdim=True))
    resampled_local_max.fill_(-torch.inf)
    resampled_local_max[:, :1].zero_()


def insert_resampled(
    sampled: torch.Tensor,
    sampled_stride: int,
    num_sampled: torch.Tensor,
    resampled_local_argmax: torch.Tensor,
    resampled_local_argmax_stride: int,
    resampled_local_max: torch.Tensor,
    resampled_local_max_stride: int,
    resample_num_blocks: int,
    cu_num_logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    temp: torch.Tensor,
    **_: Any,
) -> None:
    """Appends the drawn token to the drafts and counts it; greedy tokens are already there.

    sampled: [B, K + 1] int64, in place; num_sampled: [B] int32, in place
    """
    num_reqs = num_sampled.shape[0]
    row = (cu_num_logits[:num_reqs] + num_sampled).to(torch.int64)
    is_bonus = row == cu_num_logits[1 : num_reqs + 1] - 1
    is_greedy = temp.index_select(0, expanded_idx_mapping.index_select(0, row)) == 0
    best_block = resampled_local_max.argmax(dim=1, keepdim=True)
    drawn = resampled_local_argmax.gather(1, best_block)
    place = num_sampled.to(torch.int64).unsqueeze(1)
    before = sampled.gather(1, place)
    is_there = (is_greedy & ~is_bonus).unsqueeze(1)
    sampled.scatter_(1, place, torch.where(is_there, before, drawn))
    num_sampled.add_(1)


def keep_greedy(
    logits: torch.Tensor, draft_sampled: torch.Tensor, cu_num_logits: torch.Tensor, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Does the work of `reject`, `resample` and `insert_resampled` if all requests are greedy.

    logits: [L, V]; most: K
    Returns tokens [B, K + 1] int64, and each request's number of them: [B] int32.
    """
    starts, ends = cu_num_logits[:-1], cu_num_logits[1:]
    greatest = logits.argmax(dim=1)
    is_kept = greatest == following(draft_sampled)
    number = torch.arange(most + 1, device=logits.device, dtype=torch.int64)
    row = (starts.unsqueeze(1) + number).clamp(max=logits.shape[0] - 1)
    is_lost = ~is_kept.index_select(0, row.view(-1)).view(row.shape)
    is_lost |= number >= (ends - starts - 1).unsqueeze(1)  # the row after all drafts
    count = (is_lost.to(torch.int32).cumsum(dim=1) == 0).sum(dim=1) + 1
    tokens = greatest.index_select(0, row.view(-1)).view(row.shape)
    return tokens, count.to(torch.int32)
