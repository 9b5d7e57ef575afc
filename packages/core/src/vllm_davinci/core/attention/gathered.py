"""Attention over individually chosen rows, the same for all heads.

Rows are gathered by their indices in the cache, as `operators.attend_to_rows` defines.
"""

from collections.abc import Callable

import torch

from vllm_davinci import operators
from vllm_davinci.core.components.fused_ops import fused_op

# Most elements of the gathered rows, and of the scores, at once. One query may exceed it.
ROWS = 2**25
SCORES = 2**25
# Most indices of rows at once.
NUMBERS = 2**22
# Gives the indices of the rows of some queries, and which are hidden: [n, width] each.
RowsOf = Callable[[slice], tuple[torch.Tensor, torch.Tensor]]


def attend_to_rows(
    query: torch.Tensor,
    rows: torch.Tensor,
    rows_of: RowsOf,
    width: int,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Lets each query attend to its own `width` rows.

    query: [num_tokens, num_heads, size]; rows, sinks: as in `operators.attend_to_rows`
    Returns a new tensor like query.
    """
    attend = fused_op(operators.attend_to_rows) or operators.attend_to_rows
    num_tokens, num_heads, size = query.shape
    at_once, numbered = queries_at_once(num_heads, size, width), queries_numbered(width)
    if num_tokens <= numbered:
        whole = slice(0, num_tokens)
        return attend(query, rows, *rows_of(whole), scale, sinks, at_once)
    out = torch.empty_like(query)
    for start in range(0, num_tokens, numbered):
        part = slice(start, min(start + numbered, num_tokens))
        out[part] = attend(query[part], rows, *rows_of(part), scale, sinks, at_once)
    return out


def queries_at_once(num_heads: int, size: int, width: int) -> int:
    """Number of queries of `width` rows each that fit into the memory limit of one call."""
    return max(1, min(ROWS // (width * size), SCORES // (width * num_heads)))


def queries_numbered(width: int) -> int:
    """Number of queries whose rows' indices are computed together."""
    return max(1, NUMBERS // width)


def take_most_memory(query: torch.Tensor, width: int) -> None:
    """Allocates and frees the memory of `attend_to_rows`, so that vLLM's profile run counts it.

    width: most rows per query
    """
    num_tokens, num_heads, size = query.shape
    num = min(num_tokens, queries_at_once(num_heads, size, width))
    numbered = min(num_tokens, queries_numbered(width))
    held = [
        query.new_empty(num * width * size, dtype=each) for each in (query.dtype, torch.float32)
    ]
    held += [query.new_empty(num * (width + 1) * num_heads, dtype=torch.float32) for _ in range(3)]
    held += [query.new_empty(num * num_heads * size, dtype=torch.float32) for _ in range(2)]
    held += [query.new_empty(numbered * width, dtype=torch.int64) for _ in range(4)]
    del held
