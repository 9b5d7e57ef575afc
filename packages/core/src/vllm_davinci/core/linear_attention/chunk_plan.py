"""Layout of a step's prefills: rows of the convolution, chunks of the delta rule."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

CHUNK_TOKENS = 64  # from the models' definitions


@dataclass(frozen=True)
class ChunkPlan:
    """The order in which the prefills of a step are computed.

    Requests are sorted by their number of chunks, largest first. All first chunks come first, then
    all second ones, and so on, so that each step of the recurrence reads a slice.

    Rows of the convolution's input: width - 1 kept rows of each request, then the step's tokens in
    vLLM's order, then a row of zeros.

    order:      [n], int64, on the device: index of each request in vLLM's order
    is_fresh:   [n], int64, on the device: 1 for a request without a state yet, else 0
    num_chunks: of all requests
    steps:      per step of the recurrence, its first chunk and one past its last
    taps:       [width, num_chunks * CHUNK_TOKENS], int64, on the device: input rows of a token's
                convolution, oldest first
    kept:       [n * (width - 1)], int64, on the device: rows kept for the next step
    tokens:     [num_chunks * CHUNK_TOKENS], int64, on the device: token of each slot; in padding
                the number of tokens
    places:     [tokens], int64, on the device: slot of each token in the chunks
    """

    order: torch.Tensor
    is_fresh: torch.Tensor
    num_chunks: int
    steps: tuple[tuple[int, int], ...]
    taps: torch.Tensor
    kept: torch.Tensor
    tokens: torch.Tensor
    places: torch.Tensor


def plan_chunks(
    lengths: Sequence[int], is_fresh: Sequence[bool], width: int, device: torch.device
) -> ChunkPlan:
    """Plans a step's prefills. Starts one copy to the device, without waiting.

    lengths:  new tokens of each request, at least 1
    is_fresh: per request, True if it has no state yet
    width:    tokens that a convolution sees
    """
    length = np.asarray(lengths)
    chunks = -(-length // CHUNK_TOKENS)
    order = np.argsort(-chunks, kind="stable")
    length, chunks = length[order], chunks[order]
    starts = np.cumsum(np.asarray(lengths)) - np.asarray(lengths)
    num_tokens, num_kept = int(length.sum()), width - 1
    active = [int((chunks > step).sum()) for step in range(int(chunks[0]))]
    begins = np.cumsum([0, *active])
    steps = tuple(zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True))

    # For each slot in the chunks: its request, in the plan's order, and its token's index there.
    rows = np.concatenate([np.arange(count) for count in active])
    step = np.repeat(np.arange(len(active)), active)
    position = (step[:, None] * CHUNK_TOKENS + np.arange(CHUNK_TOKENS)).reshape(-1)
    row = np.repeat(rows, CHUNK_TOKENS)
    is_token = position < length[row]

    first_token = len(length) * num_kept  # row of the convolution's input
    zero_row = first_token + num_tokens

    def input_rows(request: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Rows of the convolution's input. position: from -num_kept, the oldest kept row"""
        kept = request * num_kept + position + num_kept
        return np.where(position < 0, kept, first_token + starts[order][request] + position)

    taps = np.stack(
        [
            np.where(is_token, input_rows(row, position + back), zero_row)
            for back in range(-num_kept, 1)
        ]
    )
    requests = np.repeat(np.arange(len(length)), num_kept)
    newest = np.tile(np.arange(-num_kept, 0), len(length))
    kept = input_rows(requests, length[requests] + newest)
    tokens = np.where(is_token, starts[order][row] + position, num_tokens)
    places = np.empty(num_tokens, dtype=np.int64)
    places[tokens[is_token]] = np.flatnonzero(is_token)

    fields = {
        "order": order,
        "is_fresh": np.asarray(is_fresh)[order],
        "kept": kept,
        "tokens": tokens,
        "places": places,
        "taps": taps.reshape(-1),
    }
    sizes = [field.size for field in fields.values()]
    copied = async_tensor_h2d(np.concatenate(list(fields.values())).astype(np.int64), device)
    on_device = dict(zip(fields, copied.split(sizes), strict=True))
    on_device["taps"] = on_device["taps"].view(width, -1)
    return ChunkPlan(num_chunks=int(chunks.sum()), steps=steps, **on_device)
