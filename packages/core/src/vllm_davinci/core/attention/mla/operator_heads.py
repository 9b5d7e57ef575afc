"""Converts queries and keys of MLA to the forms of the attention operators."""

import torch
from torch.nn.functional import pad


def with_heads(query: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Appends zero heads to [tokens, heads, size]; their results are cut off.

    A head attends alone, so the others' results keep their bits.
    """
    filling = num_heads - query.shape[1]
    return pad(query, (0, 0, 0, filling)) if filling else query


def as_prefill_takes(
    nope: torch.Tensor, rope: torch.Tensor, sizes: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Queries or keys in the form of the prefill operator; its second part may be None.

    nope:  [tokens, heads, qk_nope_head_dim]
    rope:  [tokens, heads, qk_rope_head_dim]
    sizes: zero-padded head sizes of the part without position and of the values
    """
    size, value_size = sizes
    if filling := size - nope.shape[-1]:
        nope = pad(nope, (0, filling))
    if size == value_size:
        return nope, rope
    # The operator accepts separate rotary parts only with heads of one size.
    return torch.cat([nope, rope], -1), None
