"""Loads new weights into a model whose layers are wrapped for adapters.

vLLM's models find parameters by checkpoint names, into which a wrapper inserts `base_layer`: some
loaders look through wrappers, others raise KeyError. Trainers that know of wrappers insert
`base_layer` themselves (verl), and the former loaders do not find those names.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from vllm.lora.layers import LogitsProcessorWithLoRA
from vllm.lora.layers.base import BaseLayerWithLoRA

_IN_WRAPPER = ".base_layer."


def load_past_wrappers(model: Any) -> None:
    """Makes `load_weights` of this vLLM model find its layers although they have wrappers.

    It accepts names with and without `base_layer`. The wrappers' own tensors stay: adapters are not
    among the model's parameters, and forwards with adapters still read the same layers.
    """
    load = model.load_weights

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]], **options: Any) -> Any:
        named = ((name.replace(_IN_WRAPPER, "."), tensor) for name, tensor in weights)
        with _without_wrappers(model):
            return load(named, **options)

    model.load_weights = load_weights


@contextmanager
def _without_wrappers(model: nn.Module) -> Iterator[None]:
    """Inside, wrappers are removed, so that parameters have checkpoint names."""
    places = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in parent._modules.items()
        if isinstance(child, BaseLayerWithLoRA) and not isinstance(child, LogitsProcessorWithLoRA)
    ]
    for parent, name, wrapper in places:
        parent._modules[name] = wrapper.base_layer
    try:
        yield
    finally:
        for parent, name, wrapper in places:
            parent._modules[name] = wrapper
