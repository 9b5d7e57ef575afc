"""The interface of every way between tokens and the ranks of their experts."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, NamedTuple, Protocol, TypeVar

import torch

from vllm_davinci.core.fused_moe.dispatcher.pieces import ExpertPieces


class RankExperts(Protocol):
    """The experts of a rank, as far as tokens' ways to them depend on it."""

    @property
    def first(self) -> int:
        """Number of this rank's first physical expert."""

    @property
    def num_local(self) -> int:
        """Physical experts on this rank."""

    @property
    def num_experts(self) -> int:
        """Experts on all ranks."""

    @property
    def takes_integers(self) -> bool:
        """Whether rows may come quantized to int8 by the launch that brings them."""


class SelectedTokens(NamedTuple):
    """Tokens whose experts are selected.

    x:            [num_tokens, hidden_size]
    topk_weights: [num_tokens, top_k], dtype of x
    topk_ids:     [num_tokens, top_k], int32, physical expert numbers over all ranks
    slots:        [num_tokens], int32, of adapters; None in a step without
    """

    x: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    slots: torch.Tensor | None = None

    def part(self, rows: slice) -> "SelectedTokens":
        """Some of the tokens; views."""
        slots = None if self.slots is None else self.slots[rows]
        return SelectedTokens(self.x[rows], self.topk_weights[rows], self.topk_ids[rows], slots)


@dataclass(frozen=True, kw_only=True)
class DispatchedTokens:
    """Rows for the experts of this rank; subclasses add what their `combine` needs.

    rows:              [num_rows, hidden_size], sorted by expert; int8 with scales, else dtype of x
    tokens_per_expert: [num_local], int64, on the device; rows after their sum belong to no expert
    scales:            [num_rows], fp32, of quantized rows; None for others
    slots:             [num_rows], int32, of adapters; None where none are dispatched
    """

    rows: torch.Tensor
    tokens_per_expert: torch.Tensor
    scales: torch.Tensor | None = None
    slots: torch.Tensor | None = None


D = TypeVar("D", bound=DispatchedTokens)


class TokenDispatcher(ABC, Generic[D]):
    """The way of one step's tokens through one layer. All of it runs on the current stream.

    A layer calls `prepare`, selects the experts of what it gets, calls `dispatch`, its experts and
    `combine` for each of `split`, and `finalize` with all the sums.
    """

    gathers: ClassVar[bool] = False
    """Whether `prepare` communicates, so that experts are selected where tokens have arrived."""

    keeps_rows: ClassVar[bool] = False
    """Whether `dispatch` and `combine` stay on this rank, so that a compiled operator can do both
    and the experts' products in one call."""

    slices_tokens: ClassVar[bool] = False
    """Whether each TP rank selects the experts of a slice of its DP rank's tokens."""

    balances_dummy_steps: ClassVar[bool] = False
    """Whether a step without requests is to select experts evenly, so that no rank is overrun."""

    @abstractmethod
    def prepare(
        self, x: torch.Tensor, router_logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens whose experts this rank selects, and their logits.

        x: [num_tokens, hidden_size]; router_logits: [num_tokens, num_experts]
        """

    def own_rows(self, num_tokens: int) -> slice:
        """Where this rank's own tokens are among those that `prepare` returns.

        num_tokens: of the layer's input
        """
        return slice(0, num_tokens)

    def first_token(self, num_tokens: int) -> int:
        """The place among the layer's input of the first of its `own_rows`."""
        return 0

    def split(self, tokens: SelectedTokens, pieces: ExpertPieces) -> Sequence[SelectedTokens]:
        """The tokens of each dispatch, in order; beyond them may be tokens whose sums nobody wants.

        pieces: of how many tokens experts take the rows at once
        Where rows travel, all ranks make equally many dispatches.
        """
        parts = pieces.of(len(tokens.x))
        return (tokens,) if len(parts) == 1 else [tokens.part(part) for part in parts]

    @abstractmethod
    def dispatch(self, tokens: SelectedTokens, experts: RankExperts) -> D:
        """Brings tokens to the ranks of their experts, and those that arrive here into their order.

        experts: those of this rank
        """

    @abstractmethod
    def combine(self, results: torch.Tensor, dispatched: D) -> torch.Tensor:
        """The weighted sum of each token's results, from all ranks to which it was dispatched.

        results: [num_rows, hidden_size], one of each dispatched row
        Returns [num_tokens, hidden_size], of the tokens that `dispatch` was given.
        """

    @abstractmethod
    def finalize(self, sums: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """This rank's part of the layer's output, from the sums of what `prepare` returned.

        num_tokens: of the layer's input
        Returns [num_tokens, hidden_size].
        """
