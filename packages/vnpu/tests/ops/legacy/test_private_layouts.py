"""Casts between layouts, by the older operator Identity."""

import math

import pytest
import torch
import torch_npu

ND, NC1HWC0, NZ = 2, 3, 29


def test_a_tensor_comes_back_from_its_layout() -> None:
    x = torch.randn(33, 18, dtype=torch.float16)
    there = torch_npu.npu_format_cast(x.npu(), NZ)
    assert int(torch_npu.get_npu_format(there)) == NZ
    assert torch_npu.get_storage_size(there) == math.prod((2, 3, 16, 16))
    assert torch.equal(torch_npu.npu_format_cast(there, ND).cpu(), x)
    assert torch.equal(there.cpu(), x)


def test_a_layout_of_images_is_refused_by_its_number() -> None:
    x = torch.zeros(2, 17, 4, 5, dtype=torch.float16).npu()
    with pytest.raises(RuntimeError, match=r"aclFormat 3 .* is not known here"):
        torch_npu.npu_format_cast(x, NC1HWC0)
        torch.npu.synchronize()
