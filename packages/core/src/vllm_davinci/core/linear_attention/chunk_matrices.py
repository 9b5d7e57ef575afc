"""[tokens, tokens] matrices within chunks: how each token depends on earlier ones."""

from functools import cache
from typing import NamedTuple

import torch

from vllm_davinci.core.linear_attention.chunk_plan import CHUNK_TOKENS


class _Masks(NamedTuple):
    """Masks of a chunk's [tokens, tokens].

    later:    bool, columns after the row
    identity: fp32
    joining:  fp32, per level: entries that join blocks of 1, 2, 4, ... tokens with the next block
    """

    later: torch.Tensor
    identity: torch.Tensor
    joining: tuple[torch.Tensor, ...]


@cache
def _masks(device: torch.device) -> _Masks:
    position = torch.arange(CHUNK_TOKENS)
    row, column = position[:, None], position[None]
    joining = []
    size = 1
    while size < CHUNK_TOKENS:
        same_pair = row // (2 * size) == column // (2 * size)
        joining.append(same_pair & (row // size > column // size))
        size *= 2
    return _Masks(
        (column > row).to(device),
        torch.eye(CHUNK_TOKENS, device=device),
        tuple(mask.float().to(device) for mask in joining),
    )


def decay_between(decay: torch.Tensor) -> torch.Tensor:
    """exp(g_i - g_j) if token j is not after i, else 0.

    decay: [..., tokens], the logarithm g, accumulated from the chunk's first token
    Returns [..., tokens, tokens].
    """
    # Above the diagonal the difference is positive, and its exponential may be infinite.
    difference = decay.unsqueeze(-1) - decay.unsqueeze(-2)
    return difference.masked_fill(_masks(decay.device).later, -torch.inf).exp()


def products_between(rows: torch.Tensor, keys: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """Sum over channels c of r_ic k_jc exp(g_ic - g_jc) if token j is not after i, else 0.

    A product of r exp(g) and k exp(-g) would overflow. So blocks of 1, 2, 4, ... tokens are joined
    with the next block: decays from the first block's columns to the second's rows are split at the
    first block's last token, so that no exponent is positive.

    rows:  [..., tokens, channels], fp32
    keys:  the same, or broadcastable to it
    decay: likewise, the logarithm g, accumulated from the chunk's first token
    Returns [..., tokens, tokens].
    """
    products = (rows * keys).sum(dim=-1)
    products = products.expand(torch.broadcast_shapes(products.shape, decay.shape[:-1]))
    products = products[..., None, None]  # for blocks of one token
    size = 1
    while size < CHUNK_TOKENS:
        of_pairs = (-1, 2, size)
        own_keys, own_decay = (x.unflatten(-2, of_pairs) for x in (keys, decay))
        last = own_decay[..., 0, -1:, :]
        since = (own_decay[..., 1, :, :] - last).exp()
        until = (last - own_decay[..., 0, :, :]).exp()
        seen = torch.matmul(
            rows.unflatten(-2, of_pairs)[..., 1, :, :] * since,
            (own_keys[..., 0, :, :] * until).transpose(-1, -2),
        )
        first, second = products.unflatten(-3, (-1, 2)).unbind(-3)
        upper = torch.cat([first, torch.zeros_like(first)], dim=-1)
        products = torch.cat([upper, torch.cat([seen, second], dim=-1)], dim=-2)
        size *= 2
    return products.squeeze(-3)


def unit_lower_inverse(lower: torch.Tensor) -> torch.Tensor:
    """Inverts I + the part of `lower` [..., tokens, tokens] below the diagonal.

    Combines the inverses X, Y of two diagonal blocks with L below them: the new block below is -Y L
    X. As exact as row-by-row substitution, in 6 rounds instead of 63; a series of powers is not.
    """
    masks = _masks(lower.device)
    inverse = masks.identity - lower * masks.joining[0]  # for blocks of two tokens
    for joining in masks.joining[1:]:
        inverse = inverse - torch.matmul(torch.matmul(inverse, lower * joining), inverse)
    return inverse
