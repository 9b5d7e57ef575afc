"""Mamba1's selective scan in torch: each channel has its own step sizes.

For each channel, with a state h of [state size], a step d >= 0 and rates A < 0:

    h_t = exp(d_t A) h_{t-1} + d_t x_t B_t,    y_t = h_t C_t

The decay differs between channels and entries, so a chunk cannot be computed as matrix products:
tokens are computed one after another, in fp32, for all requests at once.
Source: Gu and Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 3.
"""

from typing import NamedTuple

import torch

from vllm_davinci.core.linear_attention.chunk_plan import CHUNK_TOKENS, ChunkPlan


class Scan(NamedTuple):
    """Inputs of the scan, in fp32. T: tokens

    value: [T, channels], d x
    write: [T, state size], B
    read:  [T, state size], C
    steps: [T, channels], d; 0 in padding
    rates: [channels, state size], A
    """

    value: torch.Tensor
    write: torch.Tensor
    read: torch.Tensor
    steps: torch.Tensor
    rates: torch.Tensor


def recurrent_scan(scan: Scan, state: torch.Tensor) -> torch.Tensor:
    """Computes one token of each of n requests.

    scan:  with T = n
    state: [n, channels, state size], fp32, updated in place
    Returns [n, channels], fp32. Runs on the current stream.
    """
    state.mul_((scan.steps.unsqueeze(-1) * scan.rates).exp())
    state.addcmul_(scan.value.unsqueeze(-1), scan.write.unsqueeze(1))
    return torch.matmul(state, scan.read.unsqueeze(-1)).squeeze(-1)


def stepwise_scan(scan: Scan, state: torch.Tensor, plan: ChunkPlan) -> torch.Tensor:
    """Computes all new tokens of several requests, token by token.

    scan:  with T = plan.num_chunks * CHUNK_TOKENS, in the plan's order
    state: [requests in the plan's order, channels, state size], fp32, updated in place
    Returns [T, channels], fp32; rows of padding are undefined.
    """
    outputs = []
    for begin, end in plan.steps:
        before = state[: end - begin]
        of_tokens = [
            part.unflatten(0, (-1, CHUNK_TOKENS))[begin:end].unbind(1) for part in scan[:4]
        ]
        rows = [
            recurrent_scan(Scan(value, write, read, steps, scan.rates), before)
            for value, write, read, steps in zip(*of_tokens, strict=True)
        ]
        outputs.append(torch.stack(rows, dim=1))
    return torch.cat(outputs).flatten(0, 1)
