"""New weights of a model whose layers are in wrappers that take adapters.

vLLM's models find parameters by the names that checkpoints have, and a wrapper puts `base_layer`
between: some loaders go through wrappers, others raise KeyError. Trainers that know of wrappers put
`base_layer` into names themselves (verl), which the former do not find.
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
    """Lets `load_weights` of this model of vLLM find its layers, whatever wrappers they are in.

    It takes names with `base_layer` and without. What wrappers hold stays: adapters' tensors are
    none of the model's parameters, and forwards with adapters go on to read the same layers.
    """
    load = model.load_weights

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]], **options: Any) -> Any:
        named = ((name.replace(_IN_WRAPPER, "."), tensor) for name, tensor in weights)
        with _without_wrappers(model):
            return load(named, **options)

    model.load_weights = load_weights


@contextmanager
def _without_wrappers(model: nn.Module) -> Iterator[None]:
    """Inside, the model holds its layers themselves, and names its parameters as checkpoints do."""
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
