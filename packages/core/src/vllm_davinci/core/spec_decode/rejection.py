"""Rejection sampling with torch operators: stand-ins for the kernels of vLLM's rejection sampler.

vLLM calls them with device tensors, and nothing here reads from the device. Drafts of all requests
are concatenated; `ends` [num_requests] has the end of each request's drafts. Parameters have the
order of vLLM's kernels (v1/sample/rejection_sampler.py), and results are equal.
"""

from typing import NamedTuple

import torch

REJECTED = -1  # vLLM's, in the sampled tokens after the accepted ones


class _Drafts(NamedTuple):
    """Indices of drafts by request.

    places: [num_requests, longest], index of each draft among all; any index where there is none
    exist:  [num_requests, longest], whether the request has that draft
    """

    places: torch.Tensor
    exist: torch.Tensor

    @classmethod
    def of(cls, ends: torch.Tensor, longest: int, num_drafts: int) -> "_Drafts":
        begins = torch.zeros_like(ends)
        begins[1:] = ends[:-1]
        places = begins.unsqueeze(1) + torch.arange(longest, device=ends.device, dtype=ends.dtype)
        return cls(places.clamp(max=num_drafts - 1), places < ends.unsqueeze(1))


def requests_of_drafts(ends: torch.Tensor, num_drafts: int) -> torch.Tensor:
    """The request of each draft: [num_drafts], int64."""
    drafts = torch.arange(num_drafts, device=ends.device, dtype=ends.dtype)
    return (drafts.unsqueeze(1) >= ends).sum(dim=1)


def keep_greedy(
    output: torch.Tensor,
    ends: torch.Tensor,
    drafts: torch.Tensor,
    greatest: torch.Tensor,
    bonus: torch.Tensor,
    is_greedy: torch.Tensor | None,
    longest: int,
    uniform: torch.Tensor | None,
    rates: torch.Tensor | None,
    is_synthetic: bool,
) -> None:
    """Accepts drafts as long as they are the target's greatest tokens.

    output:    [num_requests, longest + 1] int32, written in place for greedy requests: accepted
               drafts, then the target's token, then REJECTED
    drafts:    [num_drafts]; greatest: likewise, the target's token at each draft's position
    bonus:     [num_requests, 1], the target's token after the last draft
    is_greedy: [num_requests]; None if all are greedy
    uniform:   [num_drafts], with `rates` [longest or more]: drafts are accepted at these rates
               instead
    """
    if is_synthetic:
        assert uniform is not None and rates is not None
        kept = _synthetic(ends, drafts, uniform, rates)
        tokens = torch.where(kept, drafts, greatest)
    else:
        kept, tokens = drafts == greatest, greatest
    _write(output, ends, kept, tokens, bonus, is_greedy, longest)


def keep_random(
    output: torch.Tensor,
    ends: torch.Tensor,
    drafts: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    bonus: torch.Tensor,
    recovered: torch.Tensor,
    uniform: torch.Tensor,
    is_greedy: torch.Tensor,
    longest: int,
    vocabulary: int,
    rates: torch.Tensor | None,
    has_no_draft_probs: bool,
    is_synthetic: bool,
) -> None:
    """Accepts a draft with probability min(1, target / draft). Others as in `keep_greedy`.

    draft_probs, target_probs: [num_drafts, vocabulary]; without the former, drafts had probability
                               1
    recovered:                 [num_drafts], the token that replaces a rejected draft
    uniform:                   [num_drafts], float64 from 0 to 1
    """
    if is_synthetic:
        assert rates is not None
        kept = _synthetic(ends, drafts, uniform, rates)
    else:
        columns = drafts.clamp(min=0).to(torch.int64).unsqueeze(1)
        ratio = target_probs.gather(1, columns).squeeze(1)
        # Reject tokens of target probability 0 even if the draw is 0.
        kept = (ratio > 0) & (drafts >= 0)
        if draft_probs is not None:
            draft = draft_probs.gather(1, columns).squeeze(1)
            kept &= draft > 0
            ratio = ratio / draft
        kept &= ratio >= uniform
    tokens = torch.where(kept, drafts, recovered)
    _write(output, ends, kept, tokens, bonus, ~is_greedy, longest)


def expand(
    output: torch.Tensor,
    values: torch.Tensor,
    ends: torch.Tensor,
    replaced: float,
    replacement: float,
    most: int,
) -> None:
    """Writes to each draft its request's value, with one value replaced.

    output: [num_drafts]; values: [num_requests]
    """
    if output.shape[0] == 0:
        return
    values = torch.where(values == replaced, replacement, values).to(output.dtype)
    output.copy_(values.index_select(0, requests_of_drafts(ends, output.shape[0])))


def recover(
    output: torch.Tensor,
    ends: torch.Tensor,
    drafts: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    inverse_noise: torch.Tensor,
    vocabulary: int,
    block_size: int,
    has_no_draft_probs: bool,
    has_float64_noise: bool,
) -> None:
    """Draws the token that replaces a rejected draft from max(target - draft, 0).

    output, drafts: [num_drafts] or [num_drafts, 1], the former in place
    inverse_noise: [num_requests, vocabulary], of exponential noise
    """
    if output.shape[0] == 0:
        return
    if draft_probs is None:
        columns = drafts.clamp(min=0).to(torch.int64).view(-1, 1)
        left = target_probs.scatter(1, columns, 0.0)
    else:
        left = (target_probs - draft_probs).clamp_(min=0)
    requests = requests_of_drafts(ends, output.shape[0])
    output.view(-1).copy_((left * inverse_noise.index_select(0, requests)).argmax(dim=1))


def _synthetic(
    ends: torch.Tensor, drafts: torch.Tensor, uniform: torch.Tensor, rates: torch.Tensor
) -> torch.Tensor:
    """True for each draft that is accepted at the rate of its index in its request."""
    number = torch.arange(drafts.shape[0], device=ends.device, dtype=ends.dtype)
    begins = torch.zeros_like(ends)
    begins[1:] = ends[:-1]
    places = number - begins.index_select(0, requests_of_drafts(ends, drafts.shape[0]))
    return (uniform < rates.index_select(0, places)) & (drafts >= 0)


def _write(
    output: torch.Tensor,
    ends: torch.Tensor,
    kept: torch.Tensor,
    tokens: torch.Tensor,
    bonus: torch.Tensor,
    where: torch.Tensor | None,
    longest: int,
) -> None:
    """Writes each request's tokens up to the first rejected draft.

    kept, tokens: [num_drafts]; where: [num_requests], the rows to write; None for all
    """
    bonus = bonus.view(-1, 1).to(output.dtype)
    result = bonus
    if longest:
        by_request = _Drafts.of(ends, longest, kept.shape[0])
        kept_so_far = (kept[by_request.places] & by_request.exist).to(torch.int32).cumprod(dim=1)
        candidates = torch.where(
            by_request.exist, tokens[by_request.places].to(output.dtype), bonus
        )
        candidates = torch.cat([candidates, bonus], dim=1)
        columns = torch.arange(longest + 1, device=ends.device)
        counts = columns <= kept_so_far.sum(dim=1, keepdim=True)
        result = candidates.masked_fill(~counts, REJECTED)
    if where is not None:
        result = torch.where(where.unsqueeze(1), result, output)
    output.copy_(result)
