"""Counts tokens per physical expert, on the device, while a step runs."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import is_forward_context_available

from vllm_davinci.core.inputs.ubatch_tokens import first_token_of_ubatch

if TYPE_CHECKING:
    from vllm_davinci.core.fused_moe.dispatcher.base import TokenDispatcher


@dataclass(frozen=True)
class LoadCounter:
    """Counter of one layer's tokens.

    load:    [num_physical_experts], int32, incremented
    weights: [max_tokens, top_k], int32: 1 for a counted token, 0 for padding and uncounted steps
    tp_rank: this rank's index in its DP rank
    sequence_parallel: whether each TP rank has its own tokens
    """

    load: torch.Tensor
    weights: torch.Tensor
    tp_rank: int
    sequence_parallel: bool

    def add(
        self,
        physical_ids: torch.Tensor,
        row: int,
        dispatcher: "TokenDispatcher[Any]",
        num_tokens: int,
    ) -> None:
        """Counts tokens, each on one rank only, in two launches.

        physical_ids: [num_rows, top_k], of rows from `row` on in the dispatcher's prepared tokens
        num_tokens:   of the layer's input
        """
        if self.tp_rank > 0 and not (self.sequence_parallel or dispatcher.slices_tokens):
            return  # the first TP rank counts the tokens that all TP ranks have
        own = dispatcher.own_rows(num_tokens)
        begin, end = max(row, own.start), min(row + len(physical_ids), own.stop)
        if begin >= end:
            return
        first = begin - own.start + dispatcher.first_token(num_tokens)
        if self.sequence_parallel:
            first += self.tp_rank * (own.stop - own.start)
        if is_forward_context_available():
            first += first_token_of_ubatch() or 0
        weights = self.weights[first : first + end - begin]
        ids = physical_ids[begin - row : begin - row + len(weights)]
        self.load.scatter_add_(0, ids.reshape(-1).to(torch.int64), weights.view(-1))


@dataclass
class LoadRecord:
    """A layer's counter; None if loads are not counted. Set once, before graphs are captured."""

    counter: LoadCounter | None = None

    def of_step(
        self, dispatcher: "TokenDispatcher[Any]", num_tokens: int
    ) -> Callable[[torch.Tensor, int], None]:
        """LoadCounter.add for this step: counts experts [num_rows, top_k] from a given row on."""
        if self.counter is None:
            return lambda physical_ids, row: None
        return partial(self.counter.add, dispatcher=dispatcher, num_tokens=num_tokens)
