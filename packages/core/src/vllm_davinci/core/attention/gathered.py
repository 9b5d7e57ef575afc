"""Attention over individually chosen rows, the same for all heads, composed of torch operators.

A row is both key and value. Rows are gathered by their indices in the cache, and everything is
computed in fp32. A head's sink enters the softmax and adds nothing to the sum. Callers pass at most
`queries_at_once` queries.
"""

import torch

# Most elements of the gathered rows, and of the scores, per call. One query may exceed it.
ROWS = 2**25
SCORES = 2**25


def attend_to_rows(
    query: torch.Tensor,
    rows: torch.Tensor,
    numbers: torch.Tensor,
    is_visible: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Lets each query attend to its own rows.

    query:      [num_tokens, num_heads, size]
    rows:       [num_rows, size], of the dtype of query
    numbers:    [num_tokens, width], int64; invisible entries must index a row of finite numbers
    is_visible: [num_tokens, width], at least one per query
    sinks:      [num_heads], fp32: extra score per head that belongs to no row; None without sinks
    Returns a new tensor like query. Source: transformers' eager attention of DeepSeek-V4.
    """
    num_tokens, width = numbers.shape
    chosen = rows.index_select(0, numbers.flatten()).float().view(num_tokens, width, -1)
    scores = torch.bmm(query.float(), chosen.transpose(1, 2)).mul_(scale)
    scores.masked_fill_(~is_visible.unsqueeze(1), float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1).expand(num_tokens, -1, -1)], dim=-1)
    return torch.bmm(scores.softmax(dim=-1)[..., :width], chosen).to(query.dtype)


def queries_at_once(num_heads: int, size: int, width: int) -> int:
    """Queries of `width` rows each that fit into the memory limit of one call."""
    return max(1, min(ROWS // (width * size), SCORES // (width * num_heads)))


def take_most_memory(query: torch.Tensor, width: int) -> None:
    """Allocates and frees the memory of `attend_to_rows`, so that vLLM's profile run counts it.

    width: most rows per query
    """
    num_tokens, num_heads, size = query.shape
    num = min(num_tokens, queries_at_once(num_heads, size, width))
    held = [
        query.new_empty(num * width * size, dtype=each) for each in (query.dtype, torch.float32)
    ]
    held += [query.new_empty(num * (width + 1) * num_heads, dtype=torch.float32) for _ in range(3)]
    held += [query.new_empty(num * num_heads * size, dtype=torch.float32) for _ in range(2)]
    del held
