"""The scan of Mamba 1 on the device equals its definition."""

from itertools import pairwise

import pytest
import torch

from vllm_davinci.core.linear_attention.channel_scan import Scan, recurrent_scan, stepwise_scan
from vllm_davinci.core.linear_attention.chunk_plan import plan_chunks

CHANNELS, STATE_SIZE = 20, 12


def random_scan(num_tokens: int, seed: int) -> Scan:
    generator = torch.Generator().manual_seed(seed)

    def normal(size: int) -> torch.Tensor:
        return torch.randn(num_tokens, size, generator=generator)

    steps = normal(CHANNELS).exp()
    rates = -torch.rand(CHANNELS, STATE_SIZE, generator=generator)
    return Scan(normal(CHANNELS) * steps, normal(STATE_SIZE), normal(STATE_SIZE), steps, rates)


def random_states(num_requests: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(num_requests, CHANNELS, STATE_SIZE, generator=generator)


def defined(scan: Scan, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes one request's scan by the equation, in fp64. state: the request's state"""
    state, outputs = state.double(), []
    tokens = zip(*(each.double() for each in scan[:4]), strict=True)
    for value, write, read, steps in tokens:
        state = state * (steps[:, None] * scan.rates).exp() + torch.outer(value, write)
        outputs.append(state @ read)
    return torch.stack(outputs), state


@pytest.mark.parametrize("lengths", [[1], [65], [3, 130, 64, 1]])
def test_prompts_are_the_scan_token_by_token(lengths: list[int], device: torch.device):
    scan, states = random_scan(sum(lengths), 0), random_states(len(lengths))
    plan = plan_chunks(lengths, [False] * len(lengths), 4, device)
    padded = [
        torch.cat([each, torch.zeros_like(each[:1])]).to(device).index_select(0, plan.tokens)
        for each in scan[:4]
    ]
    own = states.to(device).index_select(0, plan.order)
    outputs = stepwise_scan(Scan(*padded, scan.rates.to(device)), own, plan)
    outputs = outputs.index_select(0, plan.places).cpu()
    after = torch.empty_like(states).index_copy_(0, plan.order.cpu(), own.cpu())
    ends = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    for request, (begin, end) in enumerate(pairwise(ends)):
        of_request = Scan(*(each[begin:end] for each in scan[:4]), scan.rates)
        expected, state = defined(of_request, states[request])
        torch.testing.assert_close(outputs[begin:end].double(), expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(after[request].double(), state, atol=1e-4, rtol=1e-4)


def test_a_decode_is_a_prompt_of_one_token(device: torch.device):
    scan, states = random_scan(3, 1), random_states(3)
    own = states.to(device)
    outputs = recurrent_scan(Scan(*(each.to(device) for each in scan)), own)
    for request in range(3):
        of_request = Scan(*(each[request : request + 1] for each in scan[:4]), scan.rates)
        expected, state = defined(of_request, states[request])
        found = outputs[request].cpu().double(), own[request].cpu().double()
        torch.testing.assert_close(found, (expected[0], state), atol=1e-5, rtol=1e-5)
