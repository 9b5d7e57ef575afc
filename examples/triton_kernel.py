"""Shows a race in a Triton kernel and its fix: `vnpu run --triton --races report -- python
triton_kernel.py`.

The kernel divides a vector by its root mean square. In the racing version, each program of the grid
adds its part to the sum and divides by the sum so far; the fixed version sums in a separate launch.
`--mended` runs only the fixed version, for timing.
"""

import sys

import torch
import triton
import triton.language as tl

SIZE, BLOCK = 100_000, 4096


@triton.jit
def racing_kernel(x_ptr, out_ptr, sum_ptr, size, BLOCK: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + lanes, mask=lanes < size, other=0.0)
    tl.atomic_add(sum_ptr, tl.sum(x * x))
    mean = tl.load(sum_ptr) / size  # other programs may still have to add their parts
    tl.store(out_ptr + lanes, x * tl.rsqrt(mean), mask=lanes < size)


@triton.jit
def sum_kernel(x_ptr, sum_ptr, size, BLOCK: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + lanes, mask=lanes < size, other=0.0)
    tl.atomic_add(sum_ptr, tl.sum(x * x))


@triton.jit
def scale_kernel(x_ptr, out_ptr, sum_ptr, size, BLOCK: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + lanes, mask=lanes < size, other=0.0)
    mean = tl.load(sum_ptr) / size
    tl.store(out_ptr + lanes, x * tl.rsqrt(mean), mask=lanes < size)


def error_of(x: torch.Tensor, racing: bool) -> float:
    """Returns the largest difference from torch's result."""
    out, total = torch.empty_like(x), torch.zeros(1, device="npu")
    grid = (triton.cdiv(SIZE, BLOCK),)
    if racing:
        racing_kernel[grid](x, out, total, SIZE, BLOCK=BLOCK)
    else:
        sum_kernel[grid](x, total, SIZE, BLOCK=BLOCK)
        scale_kernel[grid](x, out, total, SIZE, BLOCK=BLOCK)
    exact = x.cpu().double()
    return float((out.cpu() - exact * exact.square().mean().rsqrt()).abs().max())


if __name__ == "__main__":
    torch.manual_seed(0)
    values = torch.randn(SIZE).npu()
    if "--mended" not in sys.argv:
        print(f"racing: wrong by {error_of(values, racing=True):.1e}")
    print(f"mended: wrong by {error_of(values, racing=False):.1e}")
