"""Imbalance of a step's tokens over ranks."""

from typing import NamedTuple

import torch


class Imbalance(NamedTuple):
    """Largest load of a rank over the mean load, averaged over layers; 1 is even.

    before: with the map that was active while counting; after: with the newest map, same loads
    """

    before: float
    after: float


def imbalance(loads: torch.Tensor, placed: torch.Tensor, ep_size: int) -> float:
    """Computes one value of Imbalance; replicas of an expert share its tokens evenly."""
    replicas = torch.zeros_like(loads, dtype=torch.float64)
    replicas.scatter_add_(1, placed, torch.ones_like(placed, dtype=torch.float64))
    of_slot = (loads / replicas.clamp_min(1)).gather(1, placed)
    of_rank = of_slot.view(len(loads), ep_size, -1).sum(-1)
    mean = of_rank.mean(1)
    counted = mean > 0
    if not counted.any():
        return 1.0
    return float((of_rank.max(1).values[counted] / mean[counted]).mean())
