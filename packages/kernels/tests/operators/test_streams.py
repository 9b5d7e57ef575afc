"""Residual streams equal torch_npu's launches bit for bit, and their definition."""

from typing import Any

import pytest
import torch
import torch_npu
from hypothesis import given
from hypothesis import strategies as st

from vllm_davinci import operators
from vllm_davinci.operators.streams import stream_weights, weighted_sum

ops = torch.ops.vllm_davinci
# Sums of a few dozen fp32 products; bf16 results differ by one rounding.
NEAR = {
    torch.float32: {"atol": 2e-5, "rtol": 2e-5},
    torch.bfloat16: {"atol": 2e-2, "rtol": 1e-2},
}


def operands(
    tokens: int, num: int, hidden: int, is_mixed: bool, steps: int, dtype: torch.dtype, seed: int
) -> dict[str, Any]:
    torch.manual_seed(seed)
    sizes = [num, num, num * num] if is_mixed else [num, num]
    rows = sum(sizes)
    places = torch.arange(num * num)
    groups = torch.stack([places // num, places % num])
    return {
        "streams": torch.randn(tokens, num, hidden).to(dtype),
        "gain": torch.ones(num * hidden),
        "fn": torch.randn(rows, num * hidden) / (num * hidden) ** 0.5,
        "base": torch.randn(rows),
        "scale": torch.randn(len(sizes)),
        "scale_of_row": torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)),
        "addends": torch.tensor([1e-3, 0.0]).repeat_interleave(num),
        "factors": torch.tensor([1.0, 2.0]).repeat_interleave(num),
        "sums": (groups.unsqueeze(1) == groups.unsqueeze(2)).float() if is_mixed else None,
        "eps": torch.full((num * num,), 1e-3) if is_mixed else None,
        "norm_eps": 1e-3,
        "sinkhorn_steps": steps if is_mixed else 0,
    }


def on_device(given: dict[str, Any]) -> dict[str, Any]:
    return {name: v.npu() if isinstance(v, torch.Tensor) else v for name, v in given.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@given(
    tokens=st.integers(0, 9),
    num=st.sampled_from([2, 4]),
    is_mixed=st.booleans(),
    steps=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_streams_are_read_and_written(dtype, tokens, num, is_mixed, steps, seed):
    host = operands(tokens, num, 48, is_mixed, steps, dtype, seed)
    device = on_device(host)
    x, post, comb = ops.collapse_streams(*device.values())
    if tokens:
        flat = device["streams"].flatten(1).float()
        rest = list(device.values())[2:]
        normed = torch_npu.npu_rms_norm(flat, device["gain"], device["norm_eps"])[0]
        weights, composed = stream_weights(normed, *rest[:-2], rest[-1])
        assert torch.equal(post, weights[:, num:])
        assert torch.equal(x, weighted_sum(flat, weights[:, :num], dtype))
        assert comb is composed is None or torch.equal(comb, composed)
    defined = operators.collapse_streams(**host)
    torch.testing.assert_close(x.cpu(), defined[0], **NEAR[dtype])
    torch.testing.assert_close(post.cpu(), defined[1], **NEAR[torch.float32])
    assert (comb is None) == (defined[2] is None) == (not is_mixed)
    if is_mixed:
        torch.testing.assert_close(comb.cpu(), defined[2], **NEAR[torch.float32])
    output = torch.randn(tokens, 48).to(dtype)
    written = ops.expand_streams(output.npu(), device["streams"], post, comb)
    assert written.shape == host["streams"].shape and written.dtype == dtype
    if tokens:
        assert torch.equal(
            written, operators.expand_streams(output.npu(), device["streams"], post, comb)
        )
    back = None if comb is None else comb.cpu()
    torch.testing.assert_close(
        written.cpu(), operators.expand_streams(output, host["streams"], post.cpu(), back),
        **NEAR[dtype],
    )  # fmt: skip


def test_rows_of_another_number_of_streams_are_refused() -> None:
    device = on_device(operands(3, 4, 16, True, 2, torch.float32, 0))
    device["fn"] = device["fn"][:-1]
    with pytest.raises(ValueError, match=r"fn of sizes \[23, 64\].*take 24 rows"):
        ops.collapse_streams(*device.values())
    with pytest.raises(ValueError, match=r"an output of sizes \[3, 8\].*streams of sizes \[3, 4"):
        ops.expand_streams(device["streams"][:, 0, :8], device["streams"], device["base"], None)
