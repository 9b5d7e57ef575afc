"""Heads of queries and keys as the operator of prefills takes them."""

import torch
from torch.nn.functional import pad


def as_prefill_takes(
    nope: torch.Tensor, rope: torch.Tensor, sizes: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A query or key of MLA as the prefill's operator takes it, and its rotary part, if separate.

    nope:  [tokens, heads, qk_nope_head_dim]
    rope:  [tokens, heads, qk_rope_head_dim]
    sizes: of the part without position, filled up with zeros to it, and of the values
    """
    size, value_size = sizes
    if filling := size - nope.shape[-1]:
        nope = pad(nope, (0, filling))
    if size == value_size:
        return nope, rope
    # The operator takes separate rotary parts only beside heads of one size.
    return torch.cat([nope, rope], -1), None
