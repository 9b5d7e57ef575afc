"""Routed experts with LoRA adapters, and the interface to the adapters' weights."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from vllm_davinci.core.fused_moe.dispatcher.base import DispatchedTokens
from vllm_davinci.core.fused_moe.local_experts import Experts, RowDeltas


class ExpertAdapters(Protocol):
    """Adapters of one layer's routed experts, on this rank."""

    def slots(self, num_tokens: int) -> torch.Tensor | None:
        """[num_tokens], int32: each token's slot, -1 for none; None in a step without adapters."""

    def of_rows(self, slots: torch.Tensor, tokens_per_expert: torch.Tensor) -> RowDeltas:
        """Deltas for rows that have arrived at their experts.

        slots: [num_rows], int32; tokens_per_expert: see DispatchedTokens
        """


@dataclass(frozen=True)
class AdaptedExperts:
    """A rank's experts in a step with adapters: rows are floats, and adapters' deltas are added."""

    takes_integers: ClassVar[bool] = False

    base: Experts
    adapters: ExpertAdapters

    @property
    def first(self) -> int:
        return self.base.first

    @property
    def num_local(self) -> int:
        return self.base.num_local

    @property
    def num_experts(self) -> int:
        return self.base.num_experts

    def of_dispatched(self, dispatched: DispatchedTokens) -> torch.Tensor:
        """See Experts.of_dispatched. Rows without slots get no deltas."""
        rows, counts, slots = dispatched.rows, dispatched.tokens_per_expert, dispatched.slots
        if rows.shape[0] == 0:
            return rows
        deltas = None if slots is None else self.adapters.of_rows(slots, counts)
        return self.base.compute_adapted(rows, counts, deltas)
