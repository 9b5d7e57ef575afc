"""Visible keys of a query: the attention operator's modes and its constant mask."""

import functools

import torch

# Side of the fixed triangular mask of npu_fused_infer_attention_score in its compressed causal
# modes (sparse_mode 2, 3 and 4), whatever the real lengths are. Source: the operator's
# documentation, parameter atten_mask.
COMPRESSED_MASK_SIDE = 2048


# Modes of npu_fused_infer_attention_score. Source: the operator's documentation, sparse_mode.
SPARSE_MODE_NONE = 0  # every query sees every key
SPARSE_MODE_CAUSAL = 3  # causal, aligned at the lower right: the last query sees every key
SPARSE_MODE_BAND = 4  # keys from `pre_tokens` before a query's position to `next_tokens` after it

ALL_TOKENS = 2**31 - 1  # no limit, as pre_tokens or next_tokens


def masking(is_causal: bool, window: int | None) -> dict[str, int]:
    """Masking options of the operator.

    window: how many keys a query sees on one side, itself included; None for all
    """
    if window is not None:
        return {
            "sparse_mode": SPARSE_MODE_BAND,
            "pre_tokens": window - 1,
            "next_tokens": 0 if is_causal else window - 1,
        }
    return {"sparse_mode": SPARSE_MODE_CAUSAL if is_causal else SPARSE_MODE_NONE}


def mask_for(options: dict[str, int], device: torch.device) -> torch.Tensor | None:
    """The mask that the operator needs with the options of `masking`."""
    return None if options["sparse_mode"] == SPARSE_MODE_NONE else compressed_causal_mask(device)


@functools.cache
def compressed_causal_mask(device: torch.device) -> torch.Tensor:
    """Upper triangle without the diagonal: 1 hides a key from a query.

    Returns [2048, 2048], int8, on `device`; the same tensor at every call.
    """
    ones = torch.ones(COMPRESSED_MASK_SIDE, COMPRESSED_MASK_SIDE, dtype=torch.int8)
    return torch.triu(ones, diagonal=1).to(device)
