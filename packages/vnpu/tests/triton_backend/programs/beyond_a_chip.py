"""Three kernels: one block exceeds a chip's on-chip memory, one kernel's blocks may exceed it
together, one has small blocks.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def large_kernel(x_ptr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    tl.store(x_ptr + lanes, tl.load(x_ptr + lanes) + 1.0)


@triton.jit
def many_kernel(x_ptr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    a, b = tl.load(x_ptr + lanes), tl.load(x_ptr + BLOCK + lanes)
    tl.store(x_ptr + lanes, a * b + a - b)


@triton.jit
def cosine_kernel(x_ptr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    tl.store(x_ptr + lanes, tl.cos(tl.load(x_ptr + lanes)))


x = torch.zeros(65536, device="npu")
large_kernel[(1,)](x, BLOCK=65536)
many_kernel[(1,)](x, BLOCK=32768)
cosine_kernel[(1,)](x, BLOCK=64)
torch.npu.synchronize()
