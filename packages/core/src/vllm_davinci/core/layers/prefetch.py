"""Weights on their way into the cache before the product that reads them."""

import torch
import torch_npu

MAX_BYTES = 16 << 20  # more would push out what the steps before it need


def prefetch(weight: torch.Tensor, max_bytes: int = MAX_BYTES) -> None:
    """Begins to read `weight` when the current stream has done its work so far.

    max_bytes: at most so many; 0 or less reads all. No result depends on it.
    """
    size = weight.untyped_storage().nbytes()
    torch_npu.npu_prefetch(weight, None, min(max_bytes, size) if max_bytes > 0 else size)
