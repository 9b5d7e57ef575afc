"""Kernels on two streams; the second waits for the first if ORDERED is set."""

import os

import torch
import triton
import triton.language as tl
from triton.runtime import driver

from vllm_davinci.vnpu import _C
from vllm_davinci.vnpu.triton_backend.driver import VirtualDriver

driver.set_active(VirtualDriver())  # this process was forked from one with another Triton backend


@triton.jit
def scale_kernel(x_ptr, factor, BLOCK: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + lanes)
    tl.store(x_ptr + lanes, x * factor)


@triton.jit
def neighbours_kernel(x_ptr, BLOCK: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + lanes + 1)
    tl.store(x_ptr + lanes, x)


x = torch.arange(4097, dtype=torch.float32).npu()
torch.npu.synchronize()
side = torch.npu.Stream()
scale_kernel[(4,)](x, 2.0, BLOCK=512)  # the first half <- launch
if os.environ["KIND"] == "ordered":
    side.wait_stream(torch.npu.current_stream())
with torch.npu.stream(side):
    begin = 2048 if os.environ["KIND"] == "apart" else 0
    scale_kernel[(4,)](x[begin:], 3.0, BLOCK=512)  # <- launch
torch.npu.synchronize()
if os.environ["KIND"] == "programs":
    neighbours_kernel[(8,)](x, BLOCK=512)
print("sum", int(x.cpu().double().sum()), "races", _C.races_found())
