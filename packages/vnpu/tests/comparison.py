"""Compares what the device computed with what torch computes on the CPU."""

from collections.abc import Sequence
from typing import TypeAlias

import torch

Result: TypeAlias = torch.Tensor | Sequence["Result"] | bool | int | float


def compare(npu: Result, cpu: Result, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Asserts that a device's result equals the CPU's: structure, shape, dtype and values.

    npu, cpu: a tensor, a number, or a sequence of these, nested at will. NaN equals NaN.
    Values must be the same unless a tolerance is given: both sides do the same arithmetic, so a
    tolerance stands where the order of a sum, or the path through a vectorised kernel, may differ.
    """
    if isinstance(cpu, torch.Tensor):
        assert isinstance(npu, torch.Tensor)
        assert npu.device.type == "npu", f"the result lies on {npu.device}"
        assert npu.dtype == cpu.dtype, f"{npu.dtype} on the device, {cpu.dtype} on the CPU"
        torch.testing.assert_close(npu.cpu(), cpu, rtol=rtol, atol=atol, equal_nan=True)
    elif isinstance(cpu, Sequence):
        assert isinstance(npu, Sequence)
        assert len(npu) == len(cpu)
        for one, other in zip(npu, cpu, strict=True):
            compare(one, other, rtol=rtol, atol=atol)
    else:
        assert type(npu) is type(cpu)
        torch.testing.assert_close(npu, cpu, rtol=rtol, atol=atol, equal_nan=True)
