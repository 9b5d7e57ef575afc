"""Residual streams: a sublayer reads their weighted sum and writes its output to all of them.

Connections of one model share constants, so that few operators compute the weights:

    gain:         [num_streams * hidden_size], ones: the norm has no weight
    scale_of_row: [rows], int64: the entry of `scale` that belongs to each row of `fn`
    addends, factors: [2 * num_streams]: of the sigmoids that become weights of pre and post
    sums:         [2, n, n] for n = num_streams ** 2: products with them sum the rows of a flat
                  matrix, and its columns; None if the streams are not mixed
    eps:          [n], added to entries and divisors; None like `sums`
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_davinci.operators.norm import rms_norm


def collapse_streams(
    streams: Tensor,
    gain: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    scale_of_row: Tensor,
    addends: Tensor,
    factors: Tensor,
    sums: Tensor | None,
    eps: Tensor | None,
    norm_eps: float,
    sinkhorn_steps: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A sublayer's input, and the weights for writing its output.

    streams: [num_tokens, num_streams, hidden_size]; all other tensors but scale_of_row are fp32
    fn:      [rows, num_streams * hidden_size]; rows of pre, post and, for mixed streams, of the
             matrix that mixes them
    base:    [rows]; scale: [2], or [3] for mixed streams
    Returns [num_tokens, hidden_size] like streams, post [num_tokens, num_streams] and the matrix
    [num_tokens, num_streams, num_streams], from (first) and to, or None; both fp32.
    Source: Xie et al. 2026, mHC; transformers' DeepseekV4HyperConnection.
    """
    flat = streams.flatten(1).float()
    weights, comb = stream_weights(
        rms_norm(flat, gain, norm_eps), fn, base, scale, scale_of_row, addends, factors, sums, eps,
        sinkhorn_steps,
    )  # fmt: skip
    pre, post = weights.chunk(2, dim=-1)
    return weighted_sum(flat, pre, streams.dtype), post, comb


def stream_weights(
    normed: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    scale_of_row: Tensor,
    addends: Tensor,
    factors: Tensor,
    sums: Tensor | None,
    eps: Tensor | None,
    sinkhorn_steps: int,
) -> tuple[Tensor, Tensor | None]:
    """Weights of pre and post, [num_tokens, 2 * num_streams], and the mixing matrix or None.

    Rows and columns of the matrix sum to about one, by Sinkhorn and Knopp's iteration: it
    normalizes columns, then `sinkhorn_steps` - 1 times rows and columns.
    normed: [num_tokens, num_streams * hidden_size]
    """
    scales = scale.index_select(0, scale_of_row)
    logits = torch.addcmul(base, torch.nn.functional.linear(normed, fn), scales)
    num = len(addends) // 2
    weights = torch.addcmul(addends, logits[:, : 2 * num].sigmoid(), factors)
    if sums is None or eps is None:
        return weights, None
    comb = logits[:, 2 * num :].unflatten(-1, (num, num)).softmax(dim=-1).flatten(1).add_(eps)
    over_rows, over_columns = sums
    comb.div_(torch.addmm(eps, comb, over_columns))
    for _ in range(sinkhorn_steps - 1):
        comb.div_(torch.addmm(eps, comb, over_rows))
        comb.div_(torch.addmm(eps, comb, over_columns))
    return weights, comb.unflatten(-1, (num, num))


def weighted_sum(flat: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums the streams by weight. flat: [num_tokens, num_streams * hidden_size], fp32; weights:
    [num_tokens, num_streams]
    """
    streams = flat.unflatten(1, (weights.shape[1], -1))
    return torch.bmm(weights.unsqueeze(1), streams).squeeze(1).to(dtype)


def expand_streams(output: Tensor, streams: Tensor, post: Tensor, comb: Tensor | None) -> Tensor:
    """The streams after the sublayer: post_j * output + sum over i of comb[i, j] * streams_i.

    output: [num_tokens, hidden_size]; streams: as `collapse_streams` got them
    post, comb: its results. Returns a new tensor like streams; sums are fp32.
    """
    kept = streams.float()
    if comb is not None:
        kept = torch.bmm(comb.transpose(1, 2), kept)
    written = torch.addcmul(kept, post.unsqueeze(-1), output.float().unsqueeze(1))
    return written.to(streams.dtype)
