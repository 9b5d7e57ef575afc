"""Chooses the scales that move from activations into weights, and input ranges, by least loss.

Candidates are compared by the loss that rounding adds to a calibration text (`Product.added_loss`),
not by the error of one layer's output, so outliers that matter to later layers are preserved.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from vllm_davinci.core.export.calibration import Product
from vllm_davinci.core.export.pairs import Pair, fold
from vllm_davinci.core.quantization.rounding import FloatLayer, InputRange
from vllm_davinci.core.quantization.scheme import Scheme

# Smoothing strengths a to try: scales are largest(|inputs|)^a / largest(|weights|)^(1 - a).
_STRENGTHS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
# Ends of ranges to try, as fractions of the whole range; with each strength only the first ones.
_FEW_SHARES = (1.0, 0.75)
_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
_SMALLEST = 1e-5  # lower limit of a channel's largest value, for channels that are never used


@dataclass(frozen=True)
class Smoothed:
    """A pair's result. strength: 0 if its scales stay; loss_before, loss: nats per token"""

    pair: Pair
    scales: torch.Tensor
    strength: float
    loss_before: float
    loss: float


def smooth(
    model: nn.Module,
    pair: Pair,
    products: Mapping[str, Product],
    scheme: Scheme,
    dtype: torch.dtype,
) -> Smoothed:
    """Moves a pair's best scales in place, in the model and in the observed products.

    products: by their first layer's name; dtype: of the stored weight, if the source is a norm
    """
    read = [product for product in products.values() if product.layers[0] in pair.readers]
    weights = [product.weight(model) for product in read]
    inputs = [torch.maximum(-product.low, product.high) for product in read]
    activations = pair.largest(torch.stack(inputs).amax(0)).clamp_min(_SMALLEST)
    columns = torch.cat(weights).abs().amax(0)
    of_weights = pair.largest(columns).clamp_min(_SMALLEST)

    def loss(scales: torch.Tensor) -> float:
        factors = pair.of_readers(scales)
        return sum(
            best_range(scaled(product, factors), weight * factors, scheme, _FEW_SHARES)[1]
            for product, weight in zip(read, weights, strict=True)
        )

    best, strength = torch.ones_like(activations), 0.0
    before = least = loss(best)
    for tried in _STRENGTHS:
        scales = activations**tried / of_weights ** (1 - tried)
        scales = _as_stored(model, pair, scales / scales.log().mean().exp(), dtype)
        if (found := loss(scales)) < least:
            best, strength, least = scales, tried, found
    if strength:
        fold(model, pair, best)
        for product in read:
            vars(product).update(vars(scaled(product, pair.of_readers(best))))
        _scale_gradients(model, pair, best, products)
    return Smoothed(pair, best, strength, before, least)


def best_range(
    product: Product, weight: torch.Tensor, scheme: Scheme, shares: Sequence[float] = _SHARES
) -> tuple[InputRange, float]:
    """The part of the inputs' range with the least loss, and that loss.

    A smaller range clips rare values; a larger one makes rounding coarser for all other values.
    weight: fp32 [out of all layers, in]
    """
    whole = InputRange(float(product.low.min()), float(product.high.max()))
    expected = product.inputs @ weight.t()
    found = []
    for share in shares if scheme.needs_input_range else (1.0,):
        tried = InputRange(whole.low * share, whole.high * share)
        tensors = scheme.rounded(FloatLayer(weight, torch.bfloat16, inputs=tried))
        seen = scheme.seen(product.inputs, tensors.__getitem__)
        error = torch.addmm(expected, seen, scheme.floats(tensors.__getitem__).t(), beta=-1)
        found.append((tried, product.added_loss(error)))
    return min(found, key=lambda each: each[1])


def scaled(product: Product, factors: torch.Tensor) -> Product:
    """Returns the product after its weights are multiplied by these factors, fp32 [in]."""
    return Product(
        product.layers,
        product.inputs / factors,
        product.gradients,
        product.low / factors,
        product.high / factors,
    )


def _scale_gradients(
    model: nn.Module, pair: Pair, scales: torch.Tensor, products: Mapping[str, Product]
) -> None:
    """Updates the gradients of a linear source, whose outputs are now divided."""
    for product in products.values():
        if pair.source in product.layers:
            sizes = [len(model.get_parameter(f"{name}.weight")) for name in product.layers]
            parts = list(product.gradients.split(sizes, 1))
            at = product.layers.index(pair.source)
            parts[at] = parts[at] / pair.of_source(scales, sizes[at])
            product.gradients = torch.cat(parts, 1)


def _as_stored(
    model: nn.Module, pair: Pair, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Scales that divide the norm's stored weight without a rounding error in its dtype."""
    weight = model.get_parameter(f"{pair.source}.weight")
    if weight.dim() > 1:
        return scales
    divided = (weight / scales).to(dtype).float()
    return torch.where(divided == 0, scales, weight / divided)
