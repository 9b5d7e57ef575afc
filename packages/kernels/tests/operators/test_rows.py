"""Operators on single rows equal torch_npu's launches bit for bit, and their definition."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_davinci import operators

ops = torch.ops.vllm_davinci
# Sums of a few dozen fp32 products; bf16 results differ by one rounding.
NEAR = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
TOKENS, AT_ONCE, SEEDS = st.integers(0, 9), st.integers(1, 4), st.integers(0, 99)


def compare(name: str, arguments: Sequence[Any], written: Sequence[int], bound: float) -> Any:
    """Compares results and written arguments with the composition and the definition."""
    definition: Callable[..., Any] = getattr(operators, name)
    runs = []
    for run, device in ((getattr(ops, name), "npu"), (definition, "npu"), (definition, "cpu")):
        given = [
            # `clone`, because each run writes to its own copy
            each.clone().to(device) if isinstance(each, torch.Tensor) else each
            for each in arguments
        ]
        result = run(*given)
        kept = [given[place] for place in written] + ([] if result is None else [result])
        runs.append([each.cpu() for each in kept])
    for compiled, composed, defined in zip(*runs, strict=True):
        assert torch.equal(compiled, composed)
        torch.testing.assert_close(compiled, defined, atol=bound, rtol=bound)
    return runs[0][-1]


@given(tokens=TOKENS, width=st.integers(1, 9), page=st.sampled_from([1, 4, 32]), seed=SEEDS)
def test_numbers_of_rows(tokens: int, width: int, page: int, seed: int) -> None:
    torch.manual_seed(seed)
    table = torch.randint(10**6, (4, -(-64 // page)), dtype=torch.int32)
    places, requests = torch.randint(64, (tokens, width)), torch.randint(4, (tokens, 1))
    # Some row numbers exceed 32 bits.
    found = compare("row_numbers", [places, requests, table, page, 10**4], [], 0)
    expected = table[requests, places // page].long() * 10**4 + places % page
    assert torch.equal(found, expected)


@DTYPES
@given(tokens=TOKENS, heads=st.integers(1, 3), size=st.sampled_from([2, 16]), seed=SEEDS)
def test_rotation(dtype: torch.dtype, tokens: int, heads: int, size: int, seed: int) -> None:
    torch.manual_seed(seed)
    x, angles = torch.randn(tokens, heads, 20).to(dtype), torch.randn(tokens, 1, size // 2)
    cos, sin = angles.cos().repeat_interleave(2, -1), angles.sin()
    sin = torch.stack([-sin, sin], -1).flatten(-2)
    turned = compare("rotate_pairs", [x, cos, sin], [0], NEAR[dtype])
    assert torch.equal(turned[..., : 20 - size], x[..., : 20 - size])
    pairs = torch.view_as_complex(x[..., 20 - size :].float().unflatten(-1, (-1, 2)))
    expected = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
    torch.testing.assert_close(
        turned[..., 20 - size :].float(), expected, atol=NEAR[dtype], rtol=NEAR[dtype]
    )


@given(
    tokens=st.integers(1, 9),
    rows=st.integers(0, 20),
    overlaps=st.booleans(),
    at_once=AT_ONCE,
    seed=SEEDS,
)
def test_compression(tokens: int, rows: int, overlaps: bool, at_once: int, seed: int) -> None:
    torch.manual_seed(seed)
    length = 4 * (1 + overlaps)
    is_missing = torch.rand(rows, length) < 0.4
    is_missing[:, -1] = False
    arguments = [
        *(torch.randn(tokens, 48), torch.randn(4, 24), torch.randint(4, (tokens,))),
        *(torch.randn(40, 48), torch.randperm(40)[:tokens], torch.randint(40, (rows, length))),
        *(is_missing, overlaps, at_once),
    ]
    compare("compress_tokens", arguments, [0, 3], 2e-5)


@DTYPES
@given(tokens=TOKENS, has_sinks=st.booleans(), at_once=st.integers(1, 4) | st.just(99), seed=SEEDS)
def test_attention(dtype, tokens, has_sinks, at_once, seed):
    torch.manual_seed(seed)
    is_hidden = torch.rand(tokens, 7) < 0.5
    is_hidden[:, 2] = False
    arguments = [
        *(torch.randn(tokens, 3, 32).to(dtype), torch.randn(50, 32).to(dtype)),
        *(torch.randint(50, (tokens, 7)), is_hidden, 0.3),
        *(torch.randn(3) if has_sinks else None, at_once),
    ]
    compare("attend_to_rows", arguments, [], NEAR[dtype])


@DTYPES
@given(tokens=TOKENS, width=st.integers(1, 12), at_once=AT_ONCE, seed=SEEDS)
def test_choice(dtype: torch.dtype, tokens: int, width: int, at_once: int, seed: int) -> None:
    torch.manual_seed(seed)
    arguments = [
        *(torch.randn(tokens, 5, 16).to(dtype), torch.randn(tokens, 5), torch.randn(12, 16)),
        *(torch.arange(12), torch.randint(13, (tokens, 1)), width, at_once),
    ]
    chosen = compare("choose_rows", arguments, [], 0)
    visible = arguments[4].clamp(max=width).squeeze(1)
    assert torch.equal((chosen >= 0).sum(1), visible)


def test_operands_that_do_not_fit_are_refused() -> None:
    def on(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(sizes, dtype=dtype, device="npu")

    def whole(*sizes: int) -> torch.Tensor:
        return on(*sizes, dtype=torch.int64)

    mask = on(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="block table of sizes"):
        ops.row_numbers(whole(2, 3), whole(2, 1), whole(2, 4), 4, 8)
    with pytest.raises(ValueError, match=r"cos of sizes \[1, 1, 4\]"):
        ops.rotate_pairs(on(2, 1, 8), on(1, 1, 4), on(2, 1, 4))
    with pytest.raises(ValueError, match=r"numbers of sizes \[2, 4\]"):
        ops.attend_to_rows(on(3, 1, 8), on(9, 8), whole(2, 4), mask, 1.0, None, 1)
    with pytest.raises(ValueError, match="at_once is 0"):
        ops.attend_to_rows(on(2, 1, 8), on(9, 8), whole(2, 3), mask, 1.0, None, 0)
    with pytest.raises(ValueError, match=r"projected of sizes \[2, 8\].*\[2, 12\]"):
        ops.compress_tokens(
            on(2, 8), on(4, 6), whole(2), on(9, 12), whole(2), whole(2, 3), mask, False, 1
        )
    with pytest.raises(ValueError, match="choose 10 keys of sizes"):
        ops.choose_rows(on(2, 1, 8), on(2, 1), on(9, 8), whole(9), whole(2, 1), 10, 1)
