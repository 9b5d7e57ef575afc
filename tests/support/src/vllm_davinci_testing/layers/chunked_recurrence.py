"""Chunks of a recurrence, compared with single steps and with other chunk lengths."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from vllm_davinci.core.linear_attention.chunk_plan import plan_chunks

Chunked = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def computed_in_chunks(
    compute: Callable[..., torch.Tensor],
    tensors: Any,
    states: torch.Tensor,
    lengths: list[int],
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns all tokens' outputs and the final states, in the order of requests.

    compute: maps (tensors, states, plan) to outputs, and writes the states in place
    """
    plan = plan_chunks(lengths, [False] * len(lengths), 4, device)
    padded = type(tensors)(
        *(
            torch.cat([each, torch.zeros_like(each[:1])]).to(device).index_select(0, plan.tokens)
            for each in tensors
        )
    )
    own = states.to(device).index_select(0, plan.order)
    outputs = compute(padded, own, plan).index_select(0, plan.places)
    return outputs.cpu(), torch.empty_like(states).index_copy_(0, plan.order.cpu(), own.cpu())


def assert_chunks_are_defined(
    tensors: Any,
    states: torch.Tensor,
    lengths: list[int],
    in_chunks: Chunked,
    defined: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    device: torch.device,
    atol: float,
) -> None:
    """Compares requests with `defined`, which maps tensors and a state to output and new state."""
    outputs, after = in_chunks(tensors, states, lengths, device)
    ends = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    for request, (begin, end) in enumerate(pairwise(ends)):
        own = type(tensors)(*(each[begin:end] for each in tensors))
        expected, state = defined(own, states[request])
        torch.testing.assert_close(outputs[begin:end].double(), expected, atol=atol, rtol=1e-4)
        torch.testing.assert_close(after[request].double(), state, atol=atol, rtol=1e-4)


def assert_steps_are_a_chunk(
    each: Sequence[Any],
    states: torch.Tensor,
    in_chunks: Chunked,
    step: Callable[[Any, torch.Tensor], torch.Tensor],
    device: torch.device,
    atol: float,
) -> None:
    """Asserts that chunks of several requests give the results of single tokens.

    each:      a named tuple of tensors [num_tokens, ...] per request, all of the same num_tokens
    states:    [num_requests, ...]
    in_chunks: maps (tensors of all requests, states, lengths, device) to outputs and new states
    step:      maps (tensors [num_requests, ...], states) to outputs, and writes the states in place
    """
    kind, num_tokens = type(each[0]), len(each[0][0])
    together = kind(*(torch.cat(parts) for parts in zip(*each, strict=True)))
    outputs, after = in_chunks(together, states, [num_tokens] * len(each), device)
    one_by_one, state = [], states.to(device)
    for token in range(num_tokens):
        tensors = (
            torch.stack([x[token] for x in parts]).to(device) for parts in zip(*each, strict=True)
        )
        one_by_one.append(step(kind(*tensors), state).cpu())
    of_request = torch.stack(one_by_one, dim=1).flatten(0, 1)
    torch.testing.assert_close(outputs, of_request, atol=atol, rtol=1e-4)
    torch.testing.assert_close(after, state.cpu(), atol=atol, rtol=1e-4)


def assert_parts_are_the_whole(
    inputs: Any, states: torch.Tensor, in_chunks: Chunked, device: torch.device, atol: float
) -> None:
    """Asserts that a prompt of 150 tokens gives the same results in one call and in parts."""
    whole, after = in_chunks(inputs, states, [150], device)
    parts = []
    for begin, end in pairwise([0, 1, 48, 112, 150]):
        own = type(inputs)(*(each[begin:end] for each in inputs))
        output, states = in_chunks(own, states, [end - begin], device)
        parts.append(output)
    torch.testing.assert_close(torch.cat(parts), whole, atol=atol, rtol=1e-4)
    torch.testing.assert_close(states, after, atol=atol, rtol=1e-4)
