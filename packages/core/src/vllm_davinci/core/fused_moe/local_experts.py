"""A rank's experts: their computation, and compiled operators that do it in one call."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, Protocol

import torch
import torch_npu

from vllm_davinci import operators
from vllm_davinci.core.components.fused_ops import fused_op
from vllm_davinci.core.fused_moe.dispatcher.base import DispatchedTokens
from vllm_davinci.core.fused_moe.gated_activation import GatedActivation
from vllm_davinci.core.fused_moe.router import RoutingRule

SPLIT_ROWS = 0  # group_type of npu_grouped_matmul: groups are runs of x's rows
SINGLE_OUTPUT = 2  # split_item: one tensor holds all groups' rows
COUNTS = 1  # group_list_type: entries are counts, not ends

SWIGLU = GatedActivation()
Product = Callable[[torch.Tensor], torch.Tensor]  # of rows with their experts' weights


class RowDeltas(Protocol):
    """Adapters' deltas for rows sorted by expert. Both methods add in place and return y."""

    def add_to_gate_up(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """y: [num_rows, 2 * intermediate_size]; x: [num_rows, hidden_size]"""

    def add_to_down(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """y: [num_rows, hidden_size]; x: [num_rows, intermediate_size]"""


@dataclass(frozen=True, kw_only=True)
class Experts(ABC):
    """The experts of this rank, in any precision.

    first, num_local: this rank holds the physical experts [first, first + num_local) of
                      num_experts
    activation:       of gated experts

    A subclass implements `_compute`; with compiled operators, `fused_ops` and `_weights` too.
    """

    takes_integers: ClassVar[bool] = False
    """True if dispatch may quantize rows to int8."""

    fused_ops: ClassVar[tuple[Callable[..., Any], Callable[..., Any]] | None] = None
    """Two compiled operators: from selected experts to each token's sum, and from router logits to
    it."""

    takes_adapters: ClassVar[bool] = False
    """True if `compute_adapted` is implemented."""

    rounds_otherwise_adapted: ClassVar[bool] = False
    """True if `compute_adapted` without deltas differs in bits from `__call__`. With adapters every
    step then uses it, so that a row's bits do not depend on adapters of other rows."""

    first: int
    num_local: int
    num_experts: int
    activation: GatedActivation = SWIGLU

    def __call__(
        self,
        rows: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Applies its expert to each row.

        rows:              [num_rows, hidden_size], sorted by expert; int8 with scales
        tokens_per_expert: [num_local], int64, on the device; rows after their sum have no expert
        scales:            [num_rows], fp32, of quantized rows, which only experts with
                           `takes_integers` accept
        Returns [num_rows, hidden_size]; rows without an expert are undefined.
        """
        if scales is None and rows.shape[0] == 0:  # a grouped product needs at least one row
            return rows
        return self._compute(rows, tokens_per_expert, scales)

    def of_dispatched(self, dispatched: DispatchedTokens) -> torch.Tensor:
        """Applies the experts to rows from a dispatcher."""
        return self(dispatched.rows, dispatched.tokens_per_expert, dispatched.scales)

    def compute_adapted(
        self, rows: torch.Tensor, tokens_per_expert: torch.Tensor, deltas: RowDeltas | None
    ) -> torch.Tensor:
        """Like `__call__`, for one or more float rows, with deltas of both projections."""
        raise NotImplementedError(type(self).__name__)

    @abstractmethod
    def _compute(
        self, rows: torch.Tensor, tokens_per_expert: torch.Tensor, scales: torch.Tensor | None
    ) -> torch.Tensor:
        """See __call__."""

    def has_fused_op(self, dtype: torch.dtype) -> bool:
        """True if `fused_experts` accepts tokens of `dtype`."""
        return self._operator(0, dtype) is not None

    def fused_experts(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        """Sorts, multiplies and sums in one compiled call; requires `has_fused_op`.

        x, topk_weights, topk_ids: see SelectedTokens
        Returns each token's weighted sum, [num_tokens, hidden_size].
        """
        operator = self._operator(0, x.dtype)
        assert operator is not None
        sums: torch.Tensor = operator(
            x=x,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            first_expert=self.first,
            num_experts=self.num_experts,
            **self._weights,
        )
        return sums

    def fused_routed_experts(
        self, x: torch.Tensor, router_logits: torch.Tensor, rule: RoutingRule
    ) -> torch.Tensor | None:
        """Like `fused_experts`, but also selects experts, by router logits; None if not
        compiled."""
        operator = self._operator(1, x.dtype) if rule.is_one_launch else None
        if operator is None:
            return None
        sums: torch.Tensor = operator(
            x=x,
            router_logits=router_logits,
            **rule.arguments,
            first_expert=self.first,
            num_experts=self.num_experts,
            **self._weights,
        )
        return sums

    def _operator(self, number: int, dtype: torch.dtype) -> Callable[..., Any] | None:
        """The `fused_ops` entry if it supports `dtype` and the activation (plain only), and is
        installed."""
        if self.fused_ops is None or not self.activation.is_plain:
            return None
        return fused_op(self.fused_ops[number])

    @property
    def _weights(self) -> dict[str, torch.Tensor]:
        """Arguments of `fused_ops`."""
        return {}

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors that a forward reads from the experts, by name: [num_local, ...] each."""
        return dict(_tensors_of(self))


def _tensors_of(part: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for each in fields(part):
        value = getattr(part, each.name)
        if isinstance(value, torch.Tensor):
            yield prefix + each.name, value
        elif is_dataclass(value):
            yield from _tensors_of(value, f"{prefix}{each.name}.")


@dataclass(frozen=True, kw_only=True)
class ExpertsOfFloats(Experts):
    """Gated experts that read and return rows of floats."""

    takes_adapters: ClassVar[bool] = True

    @abstractmethod
    def _products(
        self, rows: torch.Tensor, tokens_per_expert: torch.Tensor
    ) -> tuple[Product, Product]:
        """The products with gate and up, and with down: functions of rows."""

    def _compute(
        self, rows: torch.Tensor, tokens_per_expert: torch.Tensor, scales: torch.Tensor | None
    ) -> torch.Tensor:
        """See Experts.__call__. Three launches."""
        assert scales is None, "rows are floats here"
        return self.compute_adapted(rows, tokens_per_expert, None)

    def compute_adapted(
        self, rows: torch.Tensor, tokens_per_expert: torch.Tensor, deltas: RowDeltas | None
    ) -> torch.Tensor:
        """See Experts.compute_adapted."""
        with_gate_up, with_down = self._products(rows, tokens_per_expert)
        gate_up = with_gate_up(rows)
        if deltas is not None:
            deltas.add_to_gate_up(gate_up, rows)
        activated = self.activation(gate_up)
        result = with_down(activated)
        return result if deltas is None else deltas.add_to_down(result, activated)


@dataclass(frozen=True, kw_only=True)
class FloatExperts(ExpertsOfFloats):
    """Gated experts with unquantized weights.

    gate_up: [num_local, hidden_size, 2 * intermediate_size], gate before up
    down:    [num_local, intermediate_size, hidden_size]
    """

    fused_ops = (operators.experts, operators.routed_experts)

    gate_up: torch.Tensor
    down: torch.Tensor

    @property
    def _weights(self) -> dict[str, torch.Tensor]:
        return {"gate_up": self.gate_up, "down": self.down}

    def _products(
        self, rows: torch.Tensor, tokens_per_expert: torch.Tensor
    ) -> tuple[Product, Product]:
        return (
            lambda rows: grouped_matmul(rows, self.gate_up, tokens_per_expert),
            lambda rows: grouped_matmul(rows, self.down, tokens_per_expert),
        )


def grouped_matmul(
    rows: torch.Tensor,
    weight: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    dtype: torch.dtype | None = None,
    **scales: list[torch.Tensor],
) -> torch.Tensor:
    """Multiplies rows [num_rows, k] by their experts' weights [num_local, k, n]: [num_rows, n].

    dtype:  of the result; None: of the rows
    scales: arguments of npu_grouped_matmul for integer products
    """
    result: torch.Tensor = torch_npu.npu_grouped_matmul(
        [rows],
        [weight],
        group_list=tokens_per_expert,
        split_item=SINGLE_OUTPUT,
        group_type=SPLIT_ROWS,
        group_list_type=COUNTS,
        output_dtype=dtype,
        **scales,
    )[0]
    return result
