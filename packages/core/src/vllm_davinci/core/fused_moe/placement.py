"""Placement of one layer's experts: the experts in each rank's slots."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Placement:
    """experts_of_rank: for each expert-parallel rank the experts in its slots, each once"""

    experts_of_rank: tuple[tuple[int, ...], ...]

    @classmethod
    def in_order(cls, num_experts: int, num_redundant: int, ep_size: int) -> "Placement":
        """Places experts in order, then replicas of the first ones.

        num_redundant: slots beyond one per expert
        Source: vLLM's EplbState.build_initial_global_physical_to_logical_map.
        """
        num_slots = (num_experts + num_redundant) // ep_size
        return cls(
            tuple(
                tuple((rank * num_slots + slot) % num_experts for slot in range(num_slots))
                for rank in range(ep_size)
            )
        )

    @property
    def physical_to_logical(self) -> list[int]:
        """The expert of each slot, over all ranks."""
        return [expert for experts in self.experts_of_rank for expert in experts]

    def slots(self, rank: int, num_experts: int) -> torch.Tensor:
        """[num_experts], int32: each expert's slot on a rank, or -1."""
        slots = torch.full((num_experts,), -1, dtype=torch.int32)
        experts = list(self.experts_of_rank[rank])
        slots[experts] = torch.arange(len(experts), dtype=torch.int32)
        return slots
