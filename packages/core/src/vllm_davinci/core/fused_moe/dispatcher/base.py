"""The interface of all dispatch methods."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, NamedTuple, Protocol, TypeVar

import torch

from vllm_davinci.core.fused_moe.dispatcher.pieces import ExpertPieces


class RankExperts(Protocol):
    """A rank's experts, as far as dispatchers need them."""

    @property
    def first(self) -> int:
        """Index of this rank's first physical expert."""

    @property
    def num_local(self) -> int:
        """Physical experts on this rank."""

    @property
    def num_experts(self) -> int:
        """Experts on all ranks."""

    @property
    def takes_integers(self) -> bool:
        """True if dispatch may quantize rows to int8."""


class SelectedTokens(NamedTuple):
    """Tokens with their selected experts.

    x:            [num_tokens, hidden_size]
    topk_weights: [num_tokens, top_k], dtype of x
    topk_ids:     [num_tokens, top_k], int32, physical expert numbers over all ranks
    slots:        [num_tokens], int32, of adapters; None in a step without adapters
    """

    x: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    slots: torch.Tensor | None = None

    def part(self, rows: slice) -> "SelectedTokens":
        """The tokens in these rows, as views."""
        slots = None if self.slots is None else self.slots[rows]
        return SelectedTokens(self.x[rows], self.topk_weights[rows], self.topk_ids[rows], slots)


@dataclass(frozen=True, kw_only=True)
class DispatchedTokens:
    """Rows for the experts of this rank; subclasses add what their `combine` needs.

    rows:              [num_rows, hidden_size], sorted by expert; int8 with scales, else dtype of x
    tokens_per_expert: [num_local], int64, on the device; rows after their sum belong to no expert
    scales:            [num_rows], fp32, of quantized rows; None for others
    slots:             [num_rows], int32, of adapters; None if none are dispatched
    """

    rows: torch.Tensor
    tokens_per_expert: torch.Tensor
    scales: torch.Tensor | None = None
    slots: torch.Tensor | None = None


D = TypeVar("D", bound=DispatchedTokens)


class TokenDispatcher(ABC, Generic[D]):
    """Moves one step's tokens through one layer, on the current stream.

    A layer calls `prepare`, selects experts for the result, calls `dispatch`, its experts and
    `combine` for each chunk of `split`, and `finalize` with all sums.
    """

    gathers: ClassVar[bool] = False
    """True if `prepare` communicates, so that experts are selected after tokens have arrived."""

    keeps_rows: ClassVar[bool] = False
    """True if `dispatch` and `combine` stay on this rank, so that one call of a compiled operator
    can do both and the experts' products."""

    slices_tokens: ClassVar[bool] = False
    """True if each TP rank selects experts for a slice of its DP rank's tokens."""

    balances_dummy_steps: ClassVar[bool] = False
    """True if a step without requests must select experts evenly, so that no rank overflows."""

    @abstractmethod
    def prepare(
        self, x: torch.Tensor, router_logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the tokens whose experts this rank selects, and their logits.

        x: [num_tokens, hidden_size]; router_logits: [num_tokens, num_experts]
        """

    def own_rows(self, num_tokens: int) -> slice:
        """Slice of this rank's own tokens in the result of `prepare`.

        num_tokens: of the layer's input
        """
        return slice(0, num_tokens)

    def first_token(self, num_tokens: int) -> int:
        """Index, in the layer's input, of the first token of `own_rows`."""
        return 0

    def split(self, tokens: SelectedTokens, pieces: ExpertPieces) -> Sequence[SelectedTokens]:
        """Divides tokens into dispatches, in order; padding may follow, whose sums are unused.

        pieces: limits the number of tokens per dispatch
        If rows are sent to other ranks, all ranks make the same number of dispatches.
        """
        parts = pieces.of(len(tokens.x))
        return (tokens,) if len(parts) == 1 else [tokens.part(part) for part in parts]

    @abstractmethod
    def dispatch(self, tokens: SelectedTokens, experts: RankExperts) -> D:
        """Sends tokens to the ranks of their experts and sorts those that arrive here.

        experts: those of this rank
        """

    @abstractmethod
    def combine(self, results: torch.Tensor, dispatched: D) -> torch.Tensor:
        """The weighted sum of each token's results from all ranks to which it was dispatched.

        results: [num_rows, hidden_size], one per dispatched row
        Returns [num_tokens, hidden_size], for the tokens given to `dispatch`.
        """

    @abstractmethod
    def finalize(self, sums: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """This rank's part of the layer's output, from the sums of the prepared tokens.

        num_tokens: of the layer's input
        Returns [num_tokens, hidden_size].
        """
