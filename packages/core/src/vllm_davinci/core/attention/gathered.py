"""Attention over rows that are chosen one by one, the same for all heads, in torch's operators.

A row is key and value at once. Rows are gathered by their numbers in the cache, and everything is
computed in fp32. A head's sink takes its part of the softmax and adds nothing to the sum. Callers
take as many queries at once as `queries_at_once` says.
"""

import torch

# Most elements of the gathered rows, and of the scores, of the queries that are taken at once,
# unless one query has more.
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
    """Attention of each query over its own rows.

    query:      [num_tokens, num_heads, size]
    rows:       [num_rows, size], of the dtype of query
    numbers:    [num_tokens, width], int64; those that are not visible name a row of finite numbers
    is_visible: [num_tokens, width], at least one of each query
    sinks:      [num_heads], fp32: a score of each head that has no row; None without
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
    """How many queries of `width` rows each fit into the memory that is taken at once."""
    return max(1, min(ROWS // (width * size), SCORES // (width * num_heads)))


def take_most_memory(query: torch.Tensor, width: int) -> None:
    """Allocates and frees what `attend_to_rows` takes, so that vLLM's profile run counts it.

    width: most rows of a query
    """
    num_tokens, num_heads, size = query.shape
    num = min(num_tokens, queries_at_once(num_heads, size, width))
    held = [
        query.new_empty(num * width * size, dtype=each) for each in (query.dtype, torch.float32)
    ]
    held += [query.new_empty(num * (width + 1) * num_heads, dtype=torch.float32) for _ in range(3)]
    held += [query.new_empty(num * num_heads * size, dtype=torch.float32) for _ in range(2)]
    del held
