"""Casts between layouts of images, volumes and matrices, by the older operator Identity."""

import ctypes
import math

import pytest
import torch
import torch_npu

ND, NCHW, NC1HWC0, FRACTAL_Z, NZ, NCDHW, NDC1HWC0, FRACTAL_Z_3D = 2, 0, 3, 4, 29, 30, 32, 33


@pytest.mark.parametrize(
    ("layout", "plain", "sizes", "stored"),
    [
        (NC1HWC0, NCHW, (2, 17, 4, 5), (2, 2, 4, 5, 16)),
        (NC1HWC0, NCHW, (5, 6), (1, 1, 6, 1, 16)),
        (FRACTAL_Z, NCHW, (18, 17, 3, 2), (12, 2, 16, 16)),
        (NDC1HWC0, NCDHW, (2, 17, 2, 3, 4), (2, 2, 2, 3, 4, 16)),
        (FRACTAL_Z_3D, NCDHW, (18, 17, 2, 3, 4), (48, 2, 16, 16)),
        (NZ, ND, (33, 18), (2, 3, 16, 16)),
    ],
)
def test_a_tensor_comes_back_from_its_layout(layout, plain, sizes, stored):
    x = torch.randn(*sizes, dtype=torch.float16)
    there = torch_npu.npu_format_cast(x.npu(), layout)
    assert int(torch_npu.get_npu_format(there)) == layout
    assert torch_npu.get_storage_size(there) == math.prod(stored)
    assert torch.equal(torch_npu.npu_format_cast(there, plain).cpu(), x)
    assert torch.equal(there.cpu(), x)


def test_channels_lie_in_blocks_of_sixteen() -> None:
    x = torch.arange(2 * 17 * 2, dtype=torch.float16).view(2, 17, 2, 1)
    there = torch_npu.npu_format_cast(x.npu(), NC1HWC0)
    memory = torch.empty(2, 2, 2, 1, 16, dtype=torch.float16)
    copy, to_host = ctypes.CDLL("libascendcl.so").aclrtMemcpy, 2
    address, size = ctypes.c_void_p(there.data_ptr()), ctypes.c_size_t(memory.nbytes)
    torch.npu.synchronize()
    assert copy(ctypes.c_void_p(memory.data_ptr()), size, address, size, to_host) == 0
    assert torch.equal(memory[1, 0, 1, 0], x[1, :16, 1, 0])
    assert torch.equal(memory[1, 1, 1, 0, :1], x[1, 16:, 1, 0])
    assert not memory[:, 1, :, :, 1:].any()
