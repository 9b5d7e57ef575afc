"""Mamba2's scan on the device equals transformers and its definition."""

from functools import partial

import pytest
import torch
from transformers.models.nemotron_h import modeling_nemotron_h

from vllm_davinci.core.linear_attention.selective_scan import Scan, chunked_scan, recurrent_scan
from vllm_davinci_testing.layers.chunked_recurrence import (
    assert_chunks_are_defined,
    assert_parts_are_the_whole,
    assert_steps_are_a_chunk,
    computed_in_chunks,
)

GROUPS, REPEATS, HEAD_SIZE, STATE_SIZE = 2, 3, 16, 24


def random_scan(num_tokens: int, seed: int) -> Scan:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(num_tokens, GROUPS, *shape, generator=generator)

    steps = normal(REPEATS).exp()
    return Scan(
        normal(REPEATS, HEAD_SIZE) * steps.unsqueeze(-1),
        normal(STATE_SIZE),
        normal(STATE_SIZE),
        -0.2 * steps,
    )


def random_states(num_requests: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(9)
    shape = num_requests, GROUPS, REPEATS, HEAD_SIZE, STATE_SIZE
    return torch.randn(*shape, generator=generator)


def defined(scan: Scan, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes one request's scan by the equation, in fp64. state: the request's state"""
    state, outputs = state.double(), []
    for value, write, read, decay in zip(*(each.double() for each in scan), strict=True):
        state = state * decay.exp()[..., None, None]
        state = state + torch.einsum("grp,gn->grpn", value, write)
        outputs.append(torch.einsum("grpn,gn->grp", state, read))
    return torch.stack(outputs), state


in_chunks = partial(computed_in_chunks, chunked_scan)


@pytest.mark.parametrize("lengths", [[1], [65], [3, 130, 64, 1, 200]])
def test_chunks_are_the_scan_token_by_token(lengths: list[int], device: torch.device):
    scan, states = random_scan(sum(lengths), 0), random_states(len(lengths))
    assert_chunks_are_defined(scan, states, lengths, in_chunks, defined, device, 1e-4)


def test_tokens_one_by_one_are_a_chunk_of_them(device: torch.device):
    each = [random_scan(70, seed) for seed in range(3)]
    assert_steps_are_a_chunk(each, random_states(3), in_chunks, recurrent_scan, device, 1e-4)


def test_a_prompt_in_parts_is_the_whole_prompt(device: torch.device):
    assert_parts_are_the_whole(random_scan(150, 3), random_states(1), in_chunks, device, 1e-4)


def test_chunked_scan_equals_transformers(device: torch.device):
    num_tokens, heads = 130, GROUPS * REPEATS
    scan = random_scan(num_tokens, 4)
    outputs, state = in_chunks(scan, torch.zeros_like(random_states(1)), [num_tokens], device)
    steps = (scan.decay / -0.2).flatten(1)
    expected, last_state = modeling_nemotron_h.mamba2_chunk_scan(
        (scan.value.flatten(1, 2) / steps.unsqueeze(-1)).unsqueeze(0),
        steps.unsqueeze(0),
        torch.full((heads,), -0.2),
        scan.write.unsqueeze(0),
        scan.read.unsqueeze(0),
        chunk_size=32,
        return_final_states=True,
    )
    torch.testing.assert_close(outputs.flatten(1, 2), expected[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(state[0].flatten(0, 1), last_state[0], atol=1e-4, rtol=1e-4)
