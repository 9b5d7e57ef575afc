"""Lists of tensors are copied."""

import torch

from vllm_davinci_testing.operators.comparison import compare
from vllm_davinci_testing.operators.strategies import values


def test_lists_are_copied() -> None:
    sizes = ((7,), (3, 5), (2, 3, 67), ())
    sources = [values(each, torch.bfloat16, seed) for seed, each in enumerate(sizes)]
    targets = [torch.zeros(each, dtype=torch.bfloat16, device="npu") for each in sizes]
    torch._foreach_copy_(targets, [each.npu() for each in sources])
    compare(targets, sources)
