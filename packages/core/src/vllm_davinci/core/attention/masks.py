"""Attention masks that never change, built once per device."""

import functools

import torch

# Side of the fixed triangular mask that npu_fused_infer_attention_score takes for its
# compressed causal modes (sparse_mode 2, 3 and 4), whatever the real lengths are.
# Source: the operator's documentation, parameter atten_mask.
COMPRESSED_MASK_SIDE = 2048


@functools.cache
def compressed_causal_mask(device: torch.device) -> torch.Tensor:
    """Upper triangle without the diagonal: 1 hides a key from a query.

    Returns [2048, 2048], int8, on `device`; the same tensor at every call.
    """
    ones = torch.ones(COMPRESSED_MASK_SIDE, COMPRESSED_MASK_SIDE, dtype=torch.int8)
    return torch.triu(ones, diagonal=1).to(device)
