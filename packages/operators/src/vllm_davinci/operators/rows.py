"""Cache rows that are accessed one by one: their indices, pooling, and attention to them.

A block consists of pages of rows; all memory has rows of one width. Operators that take `at_once`
compute as many queries or groups at a time, which limits their memory.
"""

from __future__ import annotations

import torch
from torch import Tensor


def row_numbers(
    places: Tensor, requests: Tensor, block_table: Tensor, rows_per_page: int, rows_per_block: int
) -> Tensor:
    """Indices of rows, counted from the first row of the page in block 0, with the shape of places.

    places:      [n, width], int64: a row's place in its request
    requests:    [n, 1], int64: the request's row in the block table
    block_table: [num_requests, max_blocks], int32
    """
    blocks = places.div(rows_per_page, rounding_mode="floor")
    entries = torch.add(blocks, requests, alpha=block_table.shape[1])
    found = block_table.reshape(-1).index_select(0, entries.flatten()).view(entries.shape)
    return torch.add(places, blocks, alpha=-rows_per_page).add_(found, alpha=rows_per_block)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates the last entries of each row in place, in adjacent pairs, in fp32.

    x:        [n, heads, size or more]
    cos, sin: [n, 1, size], fp32, for both entries of a pair; the first entry's sine is negative
    """
    turned = x[..., -cos.shape[-1] :]
    entries = turned.float()
    swapped = entries.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    turned.copy_(torch.addcmul(entries * cos, swapped, sin))


def compress_tokens(
    projected: Tensor,
    ape: Tensor,
    places: Tensor,
    states: Tensor,
    numbers: Tensor,
    entries: Tensor,
    is_missing: Tensor,
    overlaps: bool,
    at_once: int,
) -> Tensor:
    """Stores tokens' projections, then pools those of the groups that the tokens complete.

    A pooled row sums values, weighted per feature by a softmax of the gates over its tokens.

    projected:  [num_tokens, 2 * features], fp32: values, then gates, to which ape is added in place
    ape:        [ratio, features], fp32; places: [num_tokens], int64: rows of it
    states:     [num_rows, 2 * features], fp32, written at numbers: [num_tokens], int64
    entries:    [n, tokens of a row], int64: rows of states
    is_missing: [n, tokens of a row]: entries before the first token
    overlaps:   True: the first half of a row's tokens uses the first half of the features, the
                second half of the tokens the second half
    Returns [n, size], fp32; size: features, or half of them if groups overlap.
    Source: DeepSeek-V4, 2.3.1.
    """
    projected[:, ape.shape[1] :].add_(ape.index_select(0, places))
    states.index_copy_(0, numbers, projected)
    parts = [
        _pooled(states, *part, overlaps)
        for part in zip(entries.split(at_once), is_missing.split(at_once), strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _pooled(states: Tensor, entries: Tensor, is_missing: Tensor, overlaps: bool) -> Tensor:
    gathered = states.index_select(0, entries.flatten()).view(*entries.shape, states.shape[1])
    values, gates = gathered.chunk(2, dim=-1)
    gates.masked_fill_(is_missing.unsqueeze(-1), float("-inf"))
    if not overlaps:
        return gates.softmax(dim=1).mul_(values).sum(dim=1)
    num, half = entries.shape[1] // 2, values.shape[-1] // 2
    own = [torch.cat([x[:, :num, :half], x[:, num:, half:]], dim=1) for x in (values, gates)]
    return own[1].softmax(dim=1).mul_(own[0]).sum(dim=1)


def attend_to_rows(
    query: Tensor,
    rows: Tensor,
    numbers: Tensor,
    is_hidden: Tensor,
    scale: float,
    sinks: Tensor | None,
    at_once: int,
) -> Tensor:
    """Lets each query attend to its own rows, which are key and value of all heads, in fp32.

    query:     [num_tokens, num_heads, size]
    rows:      [num_rows, size], of the dtype of query
    numbers:   [num_tokens, width], int64; hidden entries must index a row of finite numbers
    is_hidden: [num_tokens, width]; at least one row of each query is not
    sinks:     [num_heads], fp32: a score per head that belongs to no row and adds nothing to the
               sum; None without sinks
    Returns a new tensor like query. Source: transformers' eager attention of DeepSeek-V4.
    """
    out = torch.empty_like(query)
    for start in range(0, len(query), at_once):
        part = slice(start, start + at_once)
        of_part, hidden = numbers[part], is_hidden[part]
        chosen = rows.index_select(0, of_part.flatten()).float().view(*of_part.shape, rows.shape[1])
        scores = torch.bmm(query[part].float(), chosen.transpose(1, 2)).mul_(scale)
        scores.masked_fill_(hidden.unsqueeze(1), float("-inf"))
        if sinks is not None:
            last = sinks.view(1, -1, 1).expand(len(scores), -1, -1)
            scores = torch.cat([scores, last], dim=-1)
        weights = scores.softmax(dim=-1)[..., : of_part.shape[1]]
        out[part] = torch.bmm(weights, chosen).to(query.dtype)
    return out


def choose_rows(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    places: Tensor,
    num_visible: Tensor,
    width: int,
    at_once: int,
) -> Tensor:
    """Indices of each query's rows with the highest scores, best first; -1 after the last.

    A score is the sum over heads of weight * relu(query * key), in fp32.

    query:       [n, heads, size]; weights: [n, heads], fp32
    keys:        [num_rows, size], fp32; places: [num_rows], int64: 0, 1, 2, ...
    num_visible: [n, 1], int64: the first rows, which a query sees
    width:       most rows per query, up to num_rows
    Returns [n, width], int64. Source: DeepSeek-V3.2, 2.1, applied to compressed keys.
    """
    chosen = num_visible.new_empty(len(query), width)
    for start in range(0, len(query), at_once):
        part = slice(start, start + at_once)
        heads, limit = query[part].float(), num_visible[part]
        products = (heads.flatten(0, 1) @ keys.t()).relu_().view(*heads.shape[:2], -1)
        scores = torch.bmm(weights[part].unsqueeze(1), products).squeeze(1)
        scores.masked_fill_(places >= limit, float("-inf"))
        best = scores.topk(width, dim=-1).indices
        chosen[part] = best.masked_fill_(best >= limit, -1)
    return chosen
