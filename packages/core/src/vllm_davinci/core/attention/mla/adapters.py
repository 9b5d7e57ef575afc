"""Adapters of MLA: which rows use one, and the deltas of the joint up-projection kv_b_proj.

Steps compute with W_UK and W_UV, the two parts of kv_b_proj. So an adapter's delta B A is applied
in three places: to queries (B_UK, then A), to the result of attention over the cache (A, then B_UV)
and to rows that are expanded to keys and values (A, then B). The cache holds rows before this
projection, so the delta does not change it.
"""

from dataclasses import dataclass
from typing import Protocol

import torch


class StepAdapters(Protocol):
    """The adapters of the running step's rows."""

    no_lora: bool  # no row uses an adapter

    def foreign_to(self, rows: slice) -> torch.Tensor:
        """[rows, width], bool: True in the columns of slots that belong to other rows."""


def in_step(adapters: "UpProjectionAdapters | None") -> "UpProjectionAdapters | None":
    """Returns `adapters` if the step uses any, otherwise None."""
    return None if adapters is None or adapters.step.no_lora else adapters


@dataclass(frozen=True)
class UpProjectionAdapters:
    """Deltas of one layer's kv_b_proj in all slots.

    step: adapters of the running step
    a:    [width, kv_lora_rank], one row per slot and rank
    b:    [num_heads, qk_nope_head_dim + v_head_dim, width]
    nope: qk_nope_head_dim
    """

    step: StepAdapters
    a: torch.Tensor
    b: torch.Tensor
    nope: int

    def add_to_queries(self, ql_nope: torch.Tensor, q_nope: torch.Tensor) -> torch.Tensor:
        """Adds q_nope B_UK A to the first rows of the step, in place, and returns them.

        ql_nope: [rows, num_heads, kv_lora_rank]; q_nope: [rows, num_heads, qk_nope_head_dim]
        """
        by_head = torch.bmm(q_nope.transpose(0, 1), self.b[:, : self.nope])
        own = self._own(by_head)
        return ql_nope.add_(torch.matmul(own, self.a).transpose(0, 1))

    def add_to_values(self, values: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Adds attended A B_UV to the first rows of the step, in place, and returns them.

        values: [rows, num_heads, v_head_dim]; attended: [num_heads, rows, kv_lora_rank]
        """
        own = self._own(torch.matmul(attended, self.a.t()))
        return values.add_(torch.bmm(own, self.b[:, self.nope :].transpose(1, 2)).transpose(0, 1))

    def add_to_expanded(
        self, expanded: torch.Tensor, kv_c_normed: torch.Tensor, foreign: torch.Tensor
    ) -> torch.Tensor:
        """Adds kv_c A B to rows of the cache, in place, and returns them.

        expanded: [rows, num_heads * (qk_nope_head_dim + v_head_dim)]
        foreign:  [rows, width], for the requests that attend to the rows
        """
        own = torch.mm(kv_c_normed, self.a.t()).masked_fill_(foreign, 0)
        return expanded.add_(torch.mm(own, self.b.flatten(0, 1).t()))

    def _own(self, by_head: torch.Tensor) -> torch.Tensor:
        """Zeroes the slots of other requests in place: [num_heads, rows, width]."""
        return by_head.masked_fill_(self.step.foreign_to(slice(0, by_head.shape[1])), 0)
