"""The gated delta rule in torch: token by token for decodes, in chunks for prefills.

For each head, with a state S of [value size, key size], a decay g <= 0 of the head or of each
channel of its keys, and a rate beta in (0, 1):

    S_t = S_{t-1} diag(exp(g_t)) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T,    o_t = S_t q_t

Computes in fp32, whatever dtype the states are stored in.
Sources: Yang et al. 2024, "Gated Delta Networks", eq. 10, and appendix for the chunked form; Kimi
Team 2025, "Kimi Linear", for a decay of each channel.
"""

from typing import NamedTuple

import torch

from vllm_davinci.core.linear_attention.chunk_matrices import (
    decay_between,
    products_between,
    unit_lower_inverse,
)
from vllm_davinci.core.linear_attention.chunk_plan import CHUNK_TOKENS, ChunkPlan

L2_EPSILON = 1e-6  # added to the sum of squares; from the models' definitions


class Heads(NamedTuple):
    """Inputs of the rule, in fp32. T: tokens; every key head serves `repeats` value heads.

    query, key: [T, num_key_heads, key size], normalized; the query scaled
    value:      [T, num_key_heads, repeats, value size]
    decay:      [T, num_key_heads, repeats, 1 or key size], the logarithm g
    rate:       [T, num_key_heads, repeats], beta
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    decay: torch.Tensor
    rate: torch.Tensor


def l2_normalized(x: torch.Tensor) -> torch.Tensor:
    """Divides each last dimension by its length. x: [..., size], fp32"""
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + L2_EPSILON)


def recurrent_delta_rule(heads: Heads, state: torch.Tensor) -> torch.Tensor:
    """Computes one token of each of n requests.

    heads: with T = n
    state: [n, num_key_heads, repeats, value size, key size], fp32, updated in place
    Returns [n, num_key_heads, repeats, value size], fp32. Runs on the current stream.
    """
    key, query = heads.key[:, :, None, None], heads.query[:, :, None, :, None]
    state.mul_(heads.decay.exp().unsqueeze(-2))
    remembered = torch.matmul(state, key.transpose(-1, -2)).squeeze(-1)
    change = (heads.value - remembered) * heads.rate.unsqueeze(-1)
    state.addcmul_(change.unsqueeze(-1), key)
    return torch.matmul(state, query).squeeze(-1)


def chunked_delta_rule(heads: Heads, state: torch.Tensor, plan: ChunkPlan) -> torch.Tensor:
    """Computes all new tokens of several requests, CHUNK_TOKENS at a time.

    Within chunks there are only matrix products, computed for all chunks at once. Only the state
    passes from chunk to chunk, at once for all requests that still have chunks.

    heads: with T = plan.num_chunks * CHUNK_TOKENS, in the plan's order; rows of padding have
           rate, decay and key 0, and change nothing
    state: [requests in the plan's order, num_key_heads, repeats, value size, key size], fp32,
           updated in place
    Returns [T, num_key_heads, repeats, value size], fp32; rows of padding are undefined.
    """
    of_chunks = (plan.num_chunks, CHUNK_TOKENS)
    # [chunks, key heads, 1 or repeats, tokens, size]
    query, key = (x.unflatten(0, of_chunks).transpose(1, 2).unsqueeze(2) for x in heads[:2])
    value = heads.value.unflatten(0, of_chunks).permute(0, 2, 3, 1, 4)
    decay = heads.decay.unflatten(0, of_chunks).permute(0, 2, 3, 1, 4).cumsum(dim=-2)
    rates = heads.rate.unflatten(0, of_chunks).permute(0, 2, 3, 1).unsqueeze(-1)
    scores, within = _products_of_tokens(query, key, decay)
    inverse = unit_lower_inverse(within * rates)
    since_start = decay.exp()
    writes = torch.matmul(inverse, value * rates)
    reads = torch.matmul(inverse, key * (rates * since_start))
    queries = query * since_start
    total = decay[..., -1:, :]
    keys = key * (total - decay).exp()
    total = total.exp()

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


def _products_of_tokens(
    query: torch.Tensor, key: torch.Tensor, decay: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Products of each token's query, and of its key, with the decayed keys up to that token.

    Both are [chunks, key heads, repeats, tokens, tokens].
    """
    if decay.shape[-1] == 1:
        between = decay_between(decay.squeeze(-1))
        scores, within = (
            torch.matmul(rows, key.transpose(-1, -2)) * between for rows in (query, key)
        )
    else:
        scores, within = products_between(torch.stack([query, key]), key, decay).unbind(0)
    return scores, within
