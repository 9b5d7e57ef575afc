"""Per-request state of models outside the KV cache, with torch operators.

Stand-ins for kernels of vLLM's V2 runner (v1/worker/gpu/model_states/mamba_hybrid.py), with the
same parameters without `_ptr`. Nothing here reads from the device.

idx_mapping:  [B] int64, the slot of each request; -1: the request is left unchanged
num_accepted: [R] int32, by slot, in place: tokens by which a request's states have advanced
"""

from typing import Any

import torch


def scatter_num_accepted(
    idx_mapping: torch.Tensor, num_sampled: torch.Tensor, num_accepted: torch.Tensor, **_: Any
) -> None:
    """Writes each request's number of tokens, at least 1. num_sampled: [B] int32"""
    _write(idx_mapping, num_sampled[: idx_mapping.shape[0]].clamp(min=1), num_accepted)


def fill_num_accepted(
    idx_mapping: torch.Tensor, num_accepted: torch.Tensor, num_sampled: int, **_: Any
) -> None:
    """Writes one number for all requests."""
    _write(idx_mapping, num_sampled, num_accepted)


def _write(
    idx_mapping: torch.Tensor, values: torch.Tensor | int, num_accepted: torch.Tensor
) -> None:
    """Adds differences to the old values. Requests with slot -1 add 0 to slot 0."""
    slots = idx_mapping.clamp(min=0)
    change = (values - num_accepted.index_select(0, slots)) * (idx_mapping >= 0)
    num_accepted.index_add_(0, slots, change.to(num_accepted.dtype))
