"""Compares the device's results with torch's on the CPU."""

from collections.abc import Sequence
from typing import TypeAlias

import torch

# Tolerances of products and their sums: the last bits of each dtype, relative to the largest
# result.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

Result: TypeAlias = torch.Tensor | Sequence["Result"] | bool | int | float


def compare(npu: Result, cpu: Result, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Asserts that a device's result equals the CPU's: structure, shape, dtype and values.

    npu, cpu: a tensor, a number, or a sequence of these, nested at will. NaN equals NaN. Without a
        tolerance, values must be equal. Both sides do the same arithmetic; only the order of a sum,
        or the path through a vectorized kernel, may differ.
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


def near(npu: torch.Tensor, expected: torch.Tensor) -> None:
    """Asserts that sums equal the expected ones, except for rounding to their dtype."""
    t = TOLERANCE[npu.dtype]
    limit = t * float(expected.abs().max().clamp_min(1))
    torch.testing.assert_close(npu.cpu().double(), expected.double(), rtol=t, atol=limit)
