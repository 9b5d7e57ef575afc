"""Chooses layer types: the fewest high-precision layers whose loss stays within a budget."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from vllm_davinci.core.export.layer_types import UNREACHED
from vllm_davinci.core.quantization.rounding import FloatLayer, InputRange
from vllm_davinci.core.quantization.scheme import FLOAT, SCHEMES

# A type's extra cost over the cheapest type, in launches and passes over the inputs. Per-token
# scales need one more; the time and memory of floats count as four.
_PRICES = {UNREACHED: 1.0, FLOAT: 4.0}


class Loss(NamedTuple):
    """Perplexity relative to the float model's, minus 1, with its standard error over tokens."""

    share: float
    error: float

    def is_within(self, budget: float) -> bool:
        """True if similar text is likely (39 of 40 times) to lose no more than `budget`."""
        return self.share + 2 * self.error <= budget


@dataclass
class LayerCost:
    """One product and the estimated cost of each type.

    layers: names; losses: type -> estimated nats per token; range: of the input, for static types
    strength: of the smoothing before the product; kind: the chosen type
    clipped:  fraction of held-out values outside the range
    """

    layers: tuple[str, ...]
    losses: dict[str, float]
    range: InputRange
    strength: float
    kind: str
    clipped: float = 0.0


class Step(NamedTuple):
    """Changes a product to another type. saved: estimated nats per token and unit of price"""

    number: int
    kind: str
    saved: float


def ladder(kind: str) -> list[str]:
    """The types that a product may get, cheapest first."""
    dynamic = [UNREACHED] if SCHEMES[kind].needs_input_range else []
    return [kind, *dynamic, FLOAT]


def steps(costs: Sequence[LayerCost], kind: str) -> list[Step]:
    """All changes of types, by saving per price, best first."""
    found: list[Step] = []
    for number, cost in enumerate(costs):
        own: list[tuple[float, float, str]] = []  # loss saved, price, type
        for before, after in pairwise(ladder(kind)):
            saved = cost.losses[before] - cost.losses[after]
            price = _PRICES[after] - _PRICES.get(before, 0.0)
            # A step that saves less per price than the next one is merged with it.
            while own and saved / price > own[-1][0] / own[-1][1]:
                saved, price = saved + own[-1][0], price + own[-1][1]
                own.pop()
            own.append((saved, price, after))
        found += [Step(number, after, saved / price) for saved, price, after in own]
    return sorted(found, key=lambda step: -step.saved)


def choose(
    costs: Sequence[LayerCost],
    kind: str,
    budget: float,
    measure: Callable[[Sequence[LayerCost]], Loss],
) -> Loss:
    """Chooses the products' types within the budget; returns the measured loss.

    budget:  fraction of perplexity, or infinity: all get `kind`
    measure: returns the loss with the chosen types; called about log2(number of steps) times
    """
    order = steps(costs, kind)

    def take(count: int) -> Loss:
        for cost in costs:
            cost.kind = kind
        for step in order[:count]:
            costs[step.number].kind = step.kind
        return measure(costs)

    found = take(0)
    if found.is_within(budget):
        return found
    low, high, last = 0, len(order), 0  # `low` steps are too few; taking all steps suffices
    guess = _first_guess(costs, order, kind, budget)
    while high - low > 1:
        last = min(max(guess, low + 1), high - 1)
        found = take(last)
        low, high = (low, last) if found.is_within(budget) else (last, high)
        guess = (low + high) // 2
    return found if last == high else take(high)


def _first_guess(
    costs: Sequence[LayerCost], order: Sequence[Step], kind: str, budget: float
) -> int:
    """Number of steps after which the estimated loss is within the budget."""
    left = {number: cost.losses[kind] for number, cost in enumerate(costs)}
    for count, step in enumerate(order):
        if math.expm1(sum(left.values())) <= budget:
            return count
        left[step.number] = costs[step.number].losses[step.kind]
    return len(order)


@dataclass
class RoundedModel:
    """A model whose products can be rounded as in an export.

    scores: nats per token of the held-out windows, of the float model
    """

    model: nn.Module
    windows: list[torch.Tensor]
    advance: Callable[[int], None]
    scores: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.scores = self._scores()

    def measure(self, costs: Sequence[LayerCost]) -> Loss:
        """The loss with these types; also counts the values that their ranges clip."""
        clipped = {number: torch.zeros(2) for number in range(len(costs))}
        with self._rounded(costs, clipped):
            added = self._scores() - self.scores
        for number, (beyond, all_values) in clipped.items():
            costs[number].clipped = float(beyond / all_values.clamp_min(1))
        mean = float(added.mean())
        error = float(added.std() / math.sqrt(len(added))) if len(added) > 1 else math.inf
        return Loss(math.expm1(mean), math.exp(mean) * error)

    @contextmanager
    def _rounded(
        self, costs: Sequence[LayerCost], clipped: Mapping[int, torch.Tensor]
    ) -> Iterator[None]:
        changed = [
            (self.model.get_submodule(name), cost, number)
            for number, cost in enumerate(costs)
            if cost.kind != FLOAT
            for name in cost.layers
        ]
        for layer, cost, number in changed:
            layer.forward = _rounded_forward(layer, cost, clipped[number])
        try:
            yield
        finally:
            for layer, _, _ in changed:
                del layer.forward

    @torch.no_grad()
    def _scores(self) -> torch.Tensor:
        found = []
        for window in self.windows:
            logits = self.model(input_ids=window, use_cache=False).logits[0, :-1]
            found.append(functional.cross_entropy(logits, window[0, 1:], reduction="none"))
            self.advance(window.numel())
        return torch.cat(found).double()


def _rounded_forward(
    layer: nn.Module, cost: LayerCost, clipped: torch.Tensor
) -> Callable[[torch.Tensor], torch.Tensor]:
    scheme = SCHEMES[cost.kind]()
    weight = layer.get_parameter("weight")
    bias = layer.bias if isinstance(layer.bias, torch.Tensor) else None
    tensors = scheme.rounded(FloatLayer(weight, torch.bfloat16, inputs=cost.range))

    def forward(x: torch.Tensor) -> torch.Tensor:
        if scheme.needs_input_range:
            beyond = (x < cost.range.low) | (x > cost.range.high)
            clipped.add_(torch.tensor([beyond.sum(), x.numel()]))
        seen = scheme.seen(x, tensors.__getitem__)
        return functional.linear(seen, scheme.floats(tensors.__getitem__), bias)

    return forward
