"""Attention written out, as what the device's attention operators must equal."""

import torch

# float32: scores reach a few hundred, and a weight is e to the power of a score.
TOLERANCE = {torch.float32: 3e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
CAUSAL_MASK = torch.triu(torch.ones(2048, 2048, dtype=torch.int8), 1)


def visible_keys(
    queries: int, keys: int, sparse_mode: int, pre: int = 2**31, post: int = 2**31
) -> torch.Tensor:
    """[queries, keys], bool: what CANN's sparseMode lets each query see."""
    i = torch.arange(queries)[:, None]
    j = torch.arange(keys)[None]
    shift = keys - queries
    everything = torch.ones(queries, keys, dtype=torch.bool)
    return {
        0: (j >= i - pre) & (j <= i + post),
        1: everything,
        2: everything & (j <= i),
        3: everything & (j <= i + shift),
        4: (j >= i + shift - pre) & (j <= i + shift + post),
    }[sparse_mode]


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
    group = query.shape[0] // key.shape[0]
    k = key.double().repeat_interleave(group, 0)
    v = value.double().repeat_interleave(group, 0)
    scores = query.double() @ k.transpose(1, 2) * scale
    if bias is not None:
        scores = scores + bias.double()
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    lse = scores.logsumexp(-1)
    if sink is not None:
        lse = torch.logaddexp(lse, sink.double()[:, None])
    weights = (scores - lse[..., None]).exp().nan_to_num(0)
    void = (scores == -torch.inf).all(-1)
    return weights @ v, lse.masked_fill(void, torch.inf)


def close(npu: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Asserts that attention's result has a dtype and, but for its rounding, these values."""
    assert npu.dtype == dtype
    torch.testing.assert_close(
        npu.cpu().double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )
