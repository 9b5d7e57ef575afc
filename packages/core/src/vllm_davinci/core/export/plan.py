"""Calibration's decisions for an export: moved scales, input ranges, types and their loss."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vllm_davinci.core.errors import CheckpointError
from vllm_davinci.core.export.budget import LayerCost, Loss, RoundedModel, choose, ladder
from vllm_davinci.core.export.calibration import Product, load_model, observe
from vllm_davinci.core.export.layer_types import LayerTypes
from vllm_davinci.core.export.pairs import Fold, Pair, find_pairs, folds, keeping
from vllm_davinci.core.export.smoothing import Smoothed, best_range, smooth
from vllm_davinci.core.quantization.rounding import InputRange, rounded_per_channel
from vllm_davinci.core.quantization.scheme import FLOAT, SCHEMES

# One of three windows is held out for measuring.
_HELD_OUT_ONE_IN = 3
# With fewer tokens, neither ranges nor the measured loss are reliable.
FEW_TOKENS = 4096
# Fraction of held-out values outside a layer's range above which a warning is logged.
MUCH_CLIPPED = 1e-3
_MUCH_LOST = 0.03  # fraction of perplexity that is worth a warning if no budget was given


@dataclass
class Plan:
    """The decisions of one calibration.

    perplexity: of the float model on held-out text
    budget:     allowed loss, as a fraction of it, or infinity
    notes:      pairs that keep their scales, and why
    warnings:   problems that calibration found, each with the next step
    """

    costs: list[LayerCost]
    folds: dict[str, Fold]
    perplexity: float
    loss: Loss
    budget: float
    notes: list[str]
    warnings: list[str]

    @property
    def ranges(self) -> dict[str, InputRange]:
        """Layer -> the range of its input."""
        return {name: cost.range for cost in self.costs for name in cost.layers}

    @property
    def types(self) -> dict[str, str]:
        """Layer -> its type."""
        return {name: cost.kind for cost in self.costs for name in cost.layers}

    def report(self) -> dict[str, Any]:
        """The plan in machine-readable form; layers' losses are fractions of perplexity."""
        return {
            "perplexity": self.perplexity,
            "loss": self.loss.share,
            "standard_error": self.loss.error,
            "budget": None if math.isinf(self.budget) else self.budget,
            "notes": self.notes,
            "warnings": self.warnings,
            "layers": [
                {
                    "layers": list(cost.layers),
                    "type": cost.kind,
                    "estimated_loss": cost.losses,
                    "smoothing": cost.strength,
                    "range": [cost.range.low, cost.range.high],
                    "clipped": cost.clipped,
                }
                for cost in self.costs
            ],
        }


def num_tokens(windows: list[torch.Tensor]) -> int:
    """Number of tokens that `make_plan` reports to `advance` before it chooses types."""
    held_out, seen = _divided(windows)
    sampled = min(2, len(seen))
    return sum(each.numel() for each in (*held_out, *held_out, *seen, *seen[:sampled]))


def make_plan(
    source: Path,
    kind: str,
    config: dict[str, Any],
    windows: list[torch.Tensor],
    dtype: torch.dtype,
    budget: float,
    is_smoothed: bool,
    stored: Collection[str],
    advance: Callable[[int], None],
) -> Plan:
    """Runs a float model over a text and decides.

    kind:    type of the projections; budget: largest loss, as a fraction of perplexity, or infinity
    windows: int64 [1, tokens] each
    dtype:   of the exported model
    stored:  names of the checkpoint's tensors
    advance: called after each window with its number of tokens
    """
    model = load_model(source)
    types = LayerTypes(kind, config)
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and f"{name}.weight" in stored
        and types.of(f"{name}.weight", module.weight.shape, module.weight.dtype) == kind
    ]
    if not names:
        raise CheckpointError(
            f"--calibrate cannot observe {source}: transformers runs it with no layer of the "
            "checkpoint's names. Remove --calibrate and choose a type that needs none."
        )
    held_out, seen = _divided(windows)
    rounded = RoundedModel(model, held_out, advance)
    products = observe(model, names, seen, advance)
    notes: list[str] = []
    smoothed: list[Smoothed] = []
    scheme = SCHEMES[kind]()
    if is_smoothed:
        pairs, notes = _usable_pairs(model, seen[0], stored, products)
        smoothed = [smooth(model, pair, products, scheme, dtype) for pair in pairs]
    costs = [_cost(model, product, kind, smoothed) for product in products.values()]
    _round_experts(model)
    loss = choose(costs, kind, budget, rounded.measure)
    moved = [(each.pair, each.scales) for each in smoothed if each.strength]
    plan = Plan(
        costs, folds(model, moved), float(rounded.scores.mean().exp()), loss, budget, notes, []
    )
    plan.warnings += _warnings(plan, kind, sum(window.numel() for window in windows))
    return plan


def _divided(windows: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Held-out windows and calibration windows; a single window is used as both."""
    held_out = windows[_HELD_OUT_ONE_IN - 1 :: _HELD_OUT_ONE_IN] or windows[1:] or windows
    seen = [window for window in windows if all(window is not other for other in held_out)]
    return held_out, seen or windows


def _usable_pairs(
    model: nn.Module, window: torch.Tensor, stored: Collection[str], products: dict[str, Product]
) -> tuple[list[Pair], list[str]]:
    """The pairs whose scales may move, and why others keep theirs."""
    found = find_pairs(model)
    read = [pair for pair in found if any(reader in products for reader in pair.readers)]
    named = [
        pair
        for pair in read
        if all(f"{name}.weight" in stored for name in (pair.source, *pair.readers))
    ]
    kept, refused = keeping(model, named, window)
    notes = [refused] if refused else []
    if len(named) < len(read):
        notes.append(f"{len(read) - len(named)} pairs, which the checkpoint has under other names")
    if any(hasattr(module, "experts") for module in model.modules()):
        notes.append("norms before routed experts: a router and all experts of a layer read them")
        notes.append("routed experts: the text reaches each with few tokens")
    return kept, notes


def _cost(model: nn.Module, product: Product, kind: str, smoothed: list[Smoothed]) -> LayerCost:
    weight = product.weight(model)
    losses: dict[str, float] = {}
    best = InputRange(0.0, 0.0)
    for each in ladder(kind)[:-1]:
        found, losses[each] = best_range(product, weight, SCHEMES[each]())
        if each == kind:
            best = found
    losses[FLOAT] = 0.0
    strength = next(
        (each.strength for each in smoothed if product.layers[0] in each.pair.readers), 0.0
    )
    return LayerCost(product.layers, losses, best, strength, kind)


@torch.no_grad()
def _round_experts(model: nn.Module) -> None:
    """Rounds, as an export does, the weights of experts that transformers stores in one tensor."""
    for name, weight in model.named_parameters():
        if weight.dim() == 3 and ".experts." in name:
            for matrix in weight:
                integers, scale = rounded_per_channel(matrix)
                matrix.copy_(integers * scale)


def _warnings(plan: Plan, kind: str, tokens: int) -> list[str]:
    found = []
    if tokens < FEW_TOKENS:
        found.append(
            f"--calibrate needs a longer text: it has {tokens} tokens, and ranges from fewer than "
            f"{FEW_TOKENS} often clip the inputs of other texts"
        )
    if not plan.loss.is_within(plan.budget):
        found.append(
            f"--budget {plan.budget:.1%} is exceeded: held-out text loses {plan.loss.share:.1%} of "
            f"perplexity, plus twice its standard error of {plan.loss.error:.1%}, although all "
            "permitted layers are floats: give --calibrate a longer text, or use another --type"
        )
    if math.isinf(plan.budget) and plan.loss.share > _MUCH_LOST:
        found.append(
            f"held-out text loses {plan.loss.share:.1%} of perplexity: set --budget, which gives "
            "the most sensitive layers more bits"
        )
    if clipped := [cost for cost in plan.costs if cost.clipped > MUCH_CLIPPED]:
        worst = max(clipped, key=lambda cost: cost.clipped)
        found.append(
            f"{len(clipped)} products clip more than {MUCH_CLIPPED:.1%} of their inputs in "
            f"held-out text, {worst.layers[0]} {worst.clipped:.1%}: give --calibrate a longer "
            "text, similar to what the model will see"
        )
    return found
