"""Mamba2's selective scan in torch: token by token for decodes, in chunks for prefills.

For each head, with a state S of [head size, state size], a step d >= 0 and a rate A < 0:

    S_t = exp(d_t A) S_{t-1} + d_t x_t B_t^T,    y_t = S_t C_t

Computes in fp32, whatever dtype the states are stored in.
Source: Dao and Gu 2024, "Transformers are SSMs", eq. 2 and section 6.
"""

from typing import NamedTuple

import torch

from vllm_davinci.core.linear_attention.chunk_matrices import decay_between
from vllm_davinci.core.linear_attention.chunk_plan import CHUNK_TOKENS, ChunkPlan


class Scan(NamedTuple):
    """Inputs of the scan, in fp32. T: tokens; every group serves `repeats` heads.

    value: [T, groups, repeats, head size], d x
    write: [T, groups, state size], B
    read:  [T, groups, state size], C
    decay: [T, groups, repeats], the logarithm d A
    """

    value: torch.Tensor
    write: torch.Tensor
    read: torch.Tensor
    decay: torch.Tensor


def recurrent_scan(scan: Scan, state: torch.Tensor) -> torch.Tensor:
    """Computes one token of each of n requests.

    scan:  with T = n
    state: [n, groups, repeats, head size, state size], fp32, updated in place
    Returns [n, groups, repeats, head size], fp32. Runs on the current stream.
    """
    state.mul_(scan.decay.exp()[..., None, None])
    state.addcmul_(scan.value.unsqueeze(-1), scan.write[:, :, None, None])
    return torch.matmul(state, scan.read[:, :, None, :, None]).squeeze(-1)


def chunked_scan(scan: Scan, state: torch.Tensor, plan: ChunkPlan) -> torch.Tensor:
    """Computes all new tokens of several requests by chunks, like `chunked_delta_rule`.

    scan:  with T = plan.num_chunks * CHUNK_TOKENS, in the plan's order; rows of padding have
           value and decay 0, and change nothing
    state: [requests in the plan's order, groups, repeats, head size, state size], fp32, updated in
           place
    Returns [T, groups, repeats, head size], fp32; rows of padding are undefined.
    """
    of_chunks = (plan.num_chunks, CHUNK_TOKENS)
    value = scan.value.unflatten(0, of_chunks).permute(0, 2, 3, 1, 4)
    # [chunks, groups, 1, tokens, state size]
    write, read = (x.unflatten(0, of_chunks).transpose(1, 2).unsqueeze(2) for x in scan[1:3])
    decay = scan.decay.unflatten(0, of_chunks).permute(0, 2, 3, 1).cumsum(dim=-1)
    scores = torch.matmul(read, write.transpose(-1, -2)) * decay_between(decay)
    own = torch.matmul(scores, value)
    reads = read * decay.exp().unsqueeze(-1)
    total = decay[..., -1:]
    values = (value * (total - decay).exp().unsqueeze(-1)).transpose(-1, -2)
    total = total.exp().unsqueeze(-1)

    outputs = []
    for begin, end in plan.steps:
        chunks = slice(begin, end)
        before = state[: end - begin]
        outputs.append(own[chunks] + torch.matmul(reads[chunks], before.transpose(-1, -2)))
        before.mul_(total[chunks]).add_(torch.matmul(values[chunks], write[chunks]))
    return torch.cat(outputs).permute(0, 3, 1, 2, 4).flatten(0, 1)
