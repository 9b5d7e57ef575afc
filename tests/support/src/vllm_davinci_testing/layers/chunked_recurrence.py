"""Chunks of a recurrence, compared with its steps and with other chunk lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

Chunked = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def assert_steps_are_a_chunk(
    each: Sequence[Any],
    states: torch.Tensor,
    in_chunks: Chunked,
    step: Callable[[Any, torch.Tensor], torch.Tensor],
    device: torch.device,
    atol: float,
) -> None:
    """Checks that chunks give several requests the results of single tokens.

    each:      a named tuple per request, of tensors [num_tokens, ...], as many in all requests
    states:    [num_requests, ...]
    in_chunks: (tensors of all requests, states, lengths, device) to outputs and new states
    step:      (tensors [num_requests, ...], states, written in place) to outputs
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
    """Checks that a prompt of 150 tokens gives the same in one call and in parts."""
    whole, after = in_chunks(inputs, states, [150], device)
    parts = []
    for begin, end in pairwise([0, 1, 48, 112, 150]):
        own = type(inputs)(*(each[begin:end] for each in inputs))
        output, states = in_chunks(own, states, [end - begin], device)
        parts.append(output)
    torch.testing.assert_close(torch.cat(parts), whole, atol=atol, rtol=1e-4)
    torch.testing.assert_close(states, after, atol=atol, rtol=1e-4)
