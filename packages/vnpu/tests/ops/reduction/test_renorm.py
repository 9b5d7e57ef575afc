"""Slices whose norm is above a limit are scaled down to it, as torch does it on the CPU."""

import pytest
import torch
import torch_npu  # noqa: F401 - registers the device
from hypothesis import given
from hypothesis import strategies as st

from vllm_davinci_testing.operators.comparison import compare
from vllm_davinci_testing.operators.strategies import Pair, tensors


@given(x=tensors((torch.float32,), ((6, 4),)), p=st.sampled_from((1.0, 2.0)))
def test_rows_that_are_too_long_are_shortened_as_by_torch(x: Pair, p: float) -> None:
    compare(torch.renorm(x.npu, p, 0, 1.5), torch.renorm(x.cpu, p, 0, 1.5), rtol=1e-5, atol=1e-6)
    npu, cpu = x.npu.clone(), x.cpu.clone()
    compare(npu.renorm_(p, 1, 1.5), cpu.renorm_(p, 1, 1.5), rtol=1e-5, atol=1e-6)
    tables = x.npu.contiguous(), x.cpu.contiguous()
    rows = [
        torch.nn.functional.embedding(
            torch.tensor([1, 4], device=table.device), table, max_norm=1.0, norm_type=p
        )
        for table in tables
    ]
    compare(*rows, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_norm_of_order_0_counts_what_is_not_0(dtype: torch.dtype) -> None:
    """torch refuses this order on the CPU; op-plugin's tests ask for it."""
    x = torch.tensor([[1.0, 0.0, -3.0, 4.0], [0.0, 0.0, 5.0, 0.0]], dtype=dtype)
    expected = x * torch.tensor([[2 / 3], [1.0]])
    compare(torch.renorm(x.npu(), 0, 0, 2.0), expected.to(dtype), rtol=1e-3)
    compare(x.npu().renorm_(0, 0, 2.0), expected.to(dtype), rtol=1e-3)


def test_a_norm_of_a_negative_order_is_refused() -> None:
    with pytest.raises(RuntimeError, match="p must not be negative"):
        torch.renorm(torch.ones(2, 2).npu(), -1, 0, 2.0)
        torch.npu.synchronize()
