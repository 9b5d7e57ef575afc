"""Products and inverses of small matrices and vectors equal torch's on the CPU."""

import pytest
import torch

from vllm_davinci_testing.operators.comparison import compare
from vllm_davinci_testing.operators.strategies import values


def test_cross_product_equals_torch() -> None:
    x, y = values((4, 3, 5), torch.float32, 1), values((4, 3, 5), torch.float32, 2)
    compare(torch.linalg.cross(x.npu(), y.npu(), dim=1), torch.linalg.cross(x, y, dim=1))


def test_inverse_equals_torch() -> None:
    x = values((2, 5, 5), torch.float32, 1) + 4 * torch.eye(5)
    compare(torch.inverse(x.npu()), torch.inverse(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("p", [0.5, 1.0, 2.0, float("inf")])
def test_distances_equal_torch(p: float) -> None:
    x, y = values((2, 6, 4), torch.float32, 1), values((2, 3, 4), torch.float32, 2)
    compare(torch.cdist(x.npu(), y.npu(), p), torch.cdist(x, y, p), rtol=1e-5, atol=1e-6)
