"""Attention's definition with heads first, and the tolerance of results."""

import torch

from vllm_davinci.operators.attention import attend

# float32: scores reach a few hundred, and a weight is e to the power of a score.
TOLERANCE = {torch.float32: 3e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
CAUSAL_MASK = torch.triu(torch.ones(2048, 2048, dtype=torch.int8), 1)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    visible: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of one sequence in float64.

    query [heads, queries, size]; key, value [key heads, keys, size]; visible [queries, keys], bool;
    bias [heads, queries, keys]; sink [heads]. Returns [heads, queries, value size] and the log
    of each softmax's denominator [heads, queries]; rows that see no key are zero, and inf.
    """
    first = (each.transpose(0, 1) for each in (query, key, value))
    out, lse = attend(*first, scale, visible, bias=bias, sink=sink, dtype=torch.float64)
    return out.transpose(0, 1), lse.squeeze(-1).t()


def close(npu: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Asserts dtype and, except for rounding, values of attention's result."""
    assert npu.dtype == dtype
    torch.testing.assert_close(
        npu.cpu().double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )
