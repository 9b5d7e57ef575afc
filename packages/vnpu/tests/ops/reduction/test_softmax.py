"""Softmax and log softmax equal torch's on the CPU."""

import torch

from vllm_davinci_testing.operators.comparison import compare
from vllm_davinci_testing.operators.strategies import values


def test_row_of_minus_infinity_is_nan_as_on_the_cpu() -> None:
    x = torch.full((2, 5), float("-inf"))
    x[1, 2] = 0.0
    compare(x.npu().softmax(-1), x.softmax(-1))


def test_vocabulary_sized_rows_equal_torch() -> None:
    x = values((3, 32003), torch.bfloat16, 1)
    compare(x.npu().softmax(-1), x.softmax(-1), rtol=1e-2)
