"""Pooling and resampling of images equal torch's on the CPU."""

import torch

from vllm_davinci_testing.operators import aclnn
from vllm_davinci_testing.operators.comparison import compare
from vllm_davinci_testing.operators.strategies import values

functional = torch.nn.functional


def test_first_version_of_nearest_resampling_equals_torch() -> None:
    x, out = values((2, 3, 5, 4), torch.float32, 1), torch.zeros(2, 3, 9, 11).npu()
    aclnn.call("UpsampleNearest2d", x.npu(), (9, 11), out)
    compare(out, functional.interpolate(x, size=(9, 11), mode="nearest"))
