"""Padded images, sequences and volumes equal torch's on the CPU."""

import pytest
import torch

from vllm_davinci_testing.operators.comparison import compare
from vllm_davinci_testing.operators.strategies import FLOATS, values


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("mode", ["reflect", "replicate"])
@pytest.mark.parametrize(
    ("shape", "padding"),
    [((2, 3, 7), (2, 1)), ((2, 3, 5, 7), (2, 1, 0, 3)), ((1, 2, 4, 5, 7), (2, 1, 0, 3, 1, 2))],
    ids=str,
)
def test_padding_equals_torch(shape, padding, mode, dtype):
    x = values(shape, dtype, 1)
    pad = torch.nn.functional.pad
    compare(pad(x.npu(), padding, mode=mode), pad(x.float(), padding, mode=mode).to(dtype))
