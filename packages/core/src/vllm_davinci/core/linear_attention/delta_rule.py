"""The gated delta rule in torch: token by token for decodes, in chunks for prefills.

For each head, with a state S of [value size, key size], a decay g <= 0 and a rate beta in (0, 1):

    S_t = exp(g_t) S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T,    o_t = S_t q_t

All is computed in fp32, whatever dtype the states are kept in.
Source: Yang et al. 2024, "Gated Delta Networks", eq. 10, and appendix for the form in chunks.
"""

from functools import cache
from typing import NamedTuple

import torch

from vllm_davinci.core.linear_attention.chunk_plan import CHUNK_TOKENS, ChunkPlan

L2_EPSILON = 1e-6  # beside the sum of squares; of the models' definitions


class Heads(NamedTuple):
    """Inputs of the rule, in fp32. T: tokens; every key head serves `repeats` value heads.

    query, key: [T, num_key_heads, key size], normalized; the query scaled
    value:      [T, num_key_heads, repeats, value size]
    decay:      [T, num_key_heads, repeats], the logarithm g
    rate:       [T, num_key_heads, repeats], beta
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    decay: torch.Tensor
    rate: torch.Tensor


def l2_normalized(x: torch.Tensor) -> torch.Tensor:
    """Each last dimension divided by its length. x: [..., size], fp32"""
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + L2_EPSILON)


def recurrent_delta_rule(heads: Heads, state: torch.Tensor) -> torch.Tensor:
    """One token of each of n requests.

    heads: with T = n
    state: [n, num_key_heads, repeats, value size, key size], fp32, updated in place
    Returns [n, num_key_heads, repeats, value size], fp32. Runs on the current stream.
    """
    key, query = heads.key[:, :, None, None], heads.query[:, :, None, :, None]
    state.mul_(heads.decay.exp()[..., None, None])
    remembered = torch.matmul(state, key.transpose(-1, -2)).squeeze(-1)
    change = (heads.value - remembered) * heads.rate.unsqueeze(-1)
    state.addcmul_(change.unsqueeze(-1), key)
    return torch.matmul(state, query).squeeze(-1)


def chunked_delta_rule(heads: Heads, state: torch.Tensor, plan: ChunkPlan) -> torch.Tensor:
    """All new tokens of several requests, CHUNK_TOKENS at a time.

    Within a chunk everything is a product of matrices, of all chunks at once. From one chunk of a
    request to its next goes the state alone, for all requests that have as many chunks at once.

    heads: with T = plan.num_chunks * CHUNK_TOKENS, in the plan's order; rows of padding have a
           rate, a decay and a key of 0, and change nothing
    state: [requests in the plan's order, num_key_heads, repeats, value size, key size], fp32,
           updated in place
    Returns [T, num_key_heads, repeats, value size], fp32; rows of padding mean nothing.
    """
    of_chunks = (plan.num_chunks, CHUNK_TOKENS)
    # [chunks, key heads, 1 or repeats, tokens, size]
    query, key = (x.unflatten(0, of_chunks).transpose(1, 2).unsqueeze(2) for x in heads[:2])
    value = heads.value.unflatten(0, of_chunks).permute(0, 2, 3, 1, 4)
    decay, rate = (x.unflatten(0, of_chunks).permute(0, 2, 3, 1) for x in heads[3:])
    decay = decay.cumsum(dim=-1)
    masks = _masks(state.device)
    # exp(g_i - g_j) where token j is not after i. Above the diagonal the difference would be
    # positive and its exponential perhaps infinite.
    between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(masks.later, -torch.inf).exp()
    scores = torch.matmul(query, key.transpose(-1, -2)) * between
    within = torch.matmul(key, key.transpose(-1, -2)) * between * rate.unsqueeze(-1)
    inverse = _unit_lower_inverse(within, masks)
    since_start = decay.exp().unsqueeze(-1)
    rates = rate.unsqueeze(-1)
    writes = torch.matmul(inverse, value * rates)
    reads = torch.matmul(inverse, key * (rates * since_start))
    queries = query * since_start
    total = decay[..., -1:]
    keys = key * (total - decay).exp().unsqueeze(-1)
    total = total.exp().unsqueeze(-1)

    outputs = []
    for begin, end in plan.steps:
        chunks = slice(begin, end)
        before = state[: end - begin]
        transposed = before.transpose(-1, -2)
        change = writes[chunks] - torch.matmul(reads[chunks], transposed)
        outputs.append(
            torch.matmul(queries[chunks], transposed) + torch.matmul(scores[chunks], change)
        )
        before.mul_(total[chunks]).add_(torch.matmul(change.transpose(-1, -2), keys[chunks]))
    return torch.cat(outputs).permute(0, 3, 1, 2, 4).flatten(0, 1)


class _Masks(NamedTuple):
    """Masks of a chunk's [tokens, tokens].

    later:    bool, columns after the row
    identity: fp32
    joining:  fp32, per level: where blocks of 1, 2, 4, ... tokens are joined with the next one
    """

    later: torch.Tensor
    identity: torch.Tensor
    joining: tuple[torch.Tensor, ...]


@cache
def _masks(device: torch.device) -> _Masks:
    position = torch.arange(CHUNK_TOKENS)
    row, column = position[:, None], position[None]
    joining = []
    size = 1
    while size < CHUNK_TOKENS:
        same_pair = row // (2 * size) == column // (2 * size)
        joining.append(same_pair & (row // size > column // size))
        size *= 2
    return _Masks(
        (column > row).to(device),
        torch.eye(CHUNK_TOKENS, device=device),
        tuple(mask.float().to(device) for mask in joining),
    )


def _unit_lower_inverse(lower: torch.Tensor, masks: _Masks) -> torch.Tensor:
    """The inverse of I + the part of `lower` [..., tokens, tokens] below the diagonal.

    Inverses of diagonal blocks X, Y of which L is below make that of both: -Y L X is below. It is
    as exact as substitution row by row, in 6 rounds in place of 63; a series of powers is not.
    """
    inverse = masks.identity - lower * masks.joining[0]  # of blocks of two tokens
    for joining in masks.joining[1:]:
        inverse = inverse - torch.matmul(torch.matmul(inverse, lower * joining), inverse)
    return inverse
