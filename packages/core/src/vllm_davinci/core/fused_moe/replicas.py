"""Maps experts chosen by routing to physical experts, if these are not in order."""

from collections.abc import Sequence
from functools import cache

import torch

# Columns of a table with replicas: divisible by the usual numbers of replicas, so that all replicas
# of an expert get equally many columns.
COLUMNS = 60


class ReplicaTable:
    """Physical numbers of each expert. Consecutive rows of a step use its replicas in turn.

    A row uses the same replica on every rank, so that a token held by all ranks is computed once.
    Moved experts change the table in place, because graphs read it.
    """

    def __init__(
        self,
        physical_to_logical: Sequence[int],
        num_experts: int,
        device: torch.device,
        max_rows: int,
    ) -> None:
        """physical_to_logical: the expert of each slot; max_rows: most tokens of a step"""
        num_redundant = len(physical_to_logical) - num_experts
        most = num_redundant + 1
        columns = 1 if num_redundant == 0 else -(-most // COLUMNS) * COLUMNS
        self.numbers = torch.zeros(num_experts, columns, dtype=torch.int32, device=device)
        self._column_of_row = column_of_row(columns, max_rows, device) if columns > 1 else None
        self.place(physical_to_logical)

    @property
    def columns(self) -> int:
        return self.numbers.shape[1]

    def place(self, physical_to_logical: Sequence[int]) -> None:
        """Applies a new placement with the same numbers of experts and slots. The host waits."""
        replicas: list[list[int]] = [[] for _ in range(len(self.numbers))]
        for physical, expert in enumerate(physical_to_logical):
            replicas[expert].append(physical)
        rows = [[own[column % len(own)] for column in range(self.columns)] for own in replicas]
        self.numbers.copy_(torch.tensor(rows, dtype=torch.int32))

    def __call__(self, topk_ids: torch.Tensor) -> torch.Tensor:
        """topk_ids: [num_tokens, top_k], int32. Returns physical numbers, the same shape, int32."""
        if self._column_of_row is None:
            return self.numbers[:, 0][topk_ids.to(torch.int64)]
        columns = self._column_of_row[: len(topk_ids)]
        place = torch.add(columns, topk_ids.to(torch.int64), alpha=self.columns)
        return self.numbers.view(-1)[place]


@cache
def column_of_row(columns: int, max_rows: int, device: torch.device) -> torch.Tensor:
    """[max_rows, 1], int64: the column of each row of a step; one tensor shared by all layers."""
    return (torch.arange(max_rows) % columns).unsqueeze(1).to(device)
