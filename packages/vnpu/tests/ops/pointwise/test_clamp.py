"""Clamping equals torch's on the CPU."""

import pytest
import torch
from hypothesis import given

from vllm_davinci_testing.operators.comparison import compare
from vllm_davinci_testing.operators.strategies import FLOATS, INTEGERS, NUMBERS, operands, tensors


@pytest.mark.parametrize("bounds", [(-1, 2), (None, 1), (0, None), (2, -1)])
@given(x=tensors(NUMBERS, special=True))
def test_clamp_to_numbers_equals_torch(bounds: tuple[int | None, int | None], x) -> None:
    low, high = bounds
    if x.base.dtype == torch.uint8:
        low, high = (None if bound is None else abs(bound) for bound in bounds)
    compare(torch.clamp(x.npu, low, high), torch.clamp(x.cpu, low, high))
    npu, cpu = x.npu.clone(), x.cpu.clone()
    compare(npu.clamp_(low, high), cpu.clamp_(low, high))
    compare(torch.clamp_min(x.npu, 1), torch.clamp_min(x.cpu, 1))
    compare(torch.clamp_max(x.npu, 1), torch.clamp_max(x.cpu, 1))
    compare(x.npu.clone().clamp_min_(1), x.cpu.clone().clamp_min_(1))
    compare(x.npu.clone().clamp_max_(1), x.cpu.clone().clamp_max_(1))


@given(x=tensors(INTEGERS))
def test_clamping_integers_to_a_fraction_promotes(x) -> None:
    compare(torch.clamp(x.npu, 0.5, 2.5), torch.clamp(x.cpu, 0.5, 2.5))


@given(pair=operands(FLOATS, special=True))
def test_clamp_to_tensors_equals_torch(pair) -> None:
    x, y = pair
    compare(torch.clamp(x.npu, y.npu, y.npu + 1), torch.clamp(x.cpu, y.cpu, y.cpu + 1))
    compare(torch.clamp(x.npu, max=y.npu), torch.clamp(x.cpu, max=y.cpu))
    compare(torch.clamp_min(x.npu, y.npu), torch.clamp_min(x.cpu, y.cpu))
    compare(torch.clamp_max(x.npu, y.npu), torch.clamp_max(x.cpu, y.cpu))
    npu, cpu = x.npu + y.npu, x.cpu + y.cpu
    compare(npu.clamp_min_(y.npu), cpu.clamp_min_(y.cpu))
    compare(npu.clamp_max_(y.npu), cpu.clamp_max_(y.cpu))
