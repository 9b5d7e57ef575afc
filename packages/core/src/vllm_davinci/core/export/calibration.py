"""Measures a model on a text: the inputs of its linear layers and the loss from their errors."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_davinci.core.errors import CheckpointError
from vllm_davinci.core.weight_files.layer_names import FUSED_LAYERS

WINDOW_TOKENS = 512
# Number of windows whose gradients are computed, and the stride of sampled tokens. Only these
# tokens are read by a search over hundreds of roundings.
_SAMPLED_WINDOWS, _SAMPLED_ONE_IN = 2, 2


@dataclass
class Product:
    """Linear layers that read one input and are computed as one product, observed on a text.

    layers:    their names
    inputs:    fp32 [sampled tokens, in]
    gradients: fp32 [sampled tokens, outputs of all layers], of the negative log-likelihood of
               tokens drawn from the model itself
    low, high: fp32 [in], the range of each input channel over the whole text
    """

    layers: tuple[str, ...]
    inputs: torch.Tensor
    gradients: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor

    def weight(self, model: nn.Module) -> torch.Tensor:
        """Returns the stacked weights, fp32 [outputs of all layers, in]."""
        return torch.cat([model.get_parameter(f"{name}.weight") for name in self.layers])

    def added_loss(self, error: torch.Tensor) -> float:
        """Nats per token that an error of the output adds, to second order.

        The log-likelihood's curvature is the mean square of its gradient (Fisher information); the
        errors of different tokens are assumed independent.
        error: fp32, the shape of gradients
        """
        return 0.5 * float((error * self.gradients).sum(1).square().mean())


def text_windows(directory: Path, text: Path, max_tokens: int) -> list[torch.Tensor]:
    """Splits a text file into windows of tokens, int64 [1, at most WINDOW_TOKENS] each.

    A longer text gives equally spaced windows, so that all of its parts are represented.
    Raises CheckpointError if the file cannot be read or contains no token.
    """
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{text} cannot be read: {error}. Name a UTF-8 text file like the model's later inputs."
        ) from error
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokens = tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"]
    if not tokens:
        raise CheckpointError(f"{text} holds no token: name a text of some pages.")
    first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    pieces = torch.tensor(tokens).split(min(WINDOW_TOKENS, max_tokens))
    wanted = min(len(pieces), max(1, max_tokens // WINDOW_TOKENS))
    return [
        torch.tensor([first + pieces[number * len(pieces) // wanted].tolist()])
        for number in range(wanted)
    ]


def load_model(directory: Path) -> nn.Module:
    """The model in fp32 on the CPU, without weight gradients."""
    model: nn.Module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model.eval().requires_grad_(False)


def observe(
    model: nn.Module,
    names: Iterable[str],
    windows: list[torch.Tensor],
    advance: Callable[[int], None],
) -> dict[str, Product]:
    """Returns inputs and gradients of these layers' products, by their first layer's name, in
    order.

    Layers that no token reaches are left out. All windows run forward once, some also backward.
    advance: called after each window with its number of tokens
    """
    layers = {name: model.get_submodule(name) for name in names}
    ranges = _input_ranges(model, layers, windows, advance)
    step = max(1, len(windows) // _SAMPLED_WINDOWS)
    sampled = windows[::step][:_SAMPLED_WINDOWS]
    inputs, gradients = _gradients(model, layers, sampled, advance)
    found: dict[str, Product] = {}
    for parts in _products(gradients):
        low, high = ranges[parts[0]]
        joined = torch.cat([gradients[part] for part in parts], 1)
        found[parts[0]] = Product(parts, inputs[parts[0]], joined, low, high)
    return found


def _products(names: Iterable[str]) -> list[tuple[str, ...]]:
    """The layers of each product, in order."""
    fused = {part: whole for whole, parts in FUSED_LAYERS.items() for part in parts}
    found: dict[str, list[str]] = {}
    for name in names:
        parent, _, part = name.rpartition(".")
        found.setdefault(f"{parent}.{fused.get(part, part)}", []).append(name)
    return [tuple(parts) for parts in found.values()]


@torch.no_grad()
def _input_ranges(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    windows: list[torch.Tensor],
    advance: Callable[[int], None],
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Layer -> the smallest and the largest value of each channel of its input, fp32 [in]."""
    ranges: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def hook(name: str) -> Callable[..., None]:
        def widen(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            if inputs[0].numel():
                low, high = torch.aminmax(inputs[0].flatten(0, -2), dim=0)
                seen = ranges.get(name, (low, high))
                ranges[name] = torch.minimum(seen[0], low), torch.maximum(seen[1], high)

        return widen

    handles = [layer.register_forward_pre_hook(hook(name)) for name, layer in layers.items()]
    for window in windows:
        model(input_ids=window, use_cache=False)
        advance(window.numel())
    for handle in handles:
        handle.remove()
    return ranges


@torch.enable_grad()
def _gradients(
    model: Any,
    layers: Mapping[str, nn.Module],
    windows: list[torch.Tensor],
    advance: Callable[[int], None],
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Layer -> inputs and gradients of outputs, fp32 [sampled tokens, in] and [.., out]."""
    inputs: dict[str, list[torch.Tensor]] = {}
    gradients: dict[str, list[torch.Tensor]] = {}

    def hook(name: str) -> Callable[..., None]:
        def keep(module: nn.Module, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            if not given[0].numel():
                return
            inputs.setdefault(name, []).append(given[0].detach().flatten(0, -2)[::_SAMPLED_ONE_IN])
            # Stays zero if the output affects a choice only, as in an indexer.
            taken = torch.zeros_like(output.detach().flatten(0, -2)[::_SAMPLED_ONE_IN])
            gradients.setdefault(name, []).append(taken)

            def copy(gradient: torch.Tensor) -> None:
                taken.copy_(gradient.flatten(0, -2)[::_SAMPLED_ONE_IN])

            if output.requires_grad:
                output.register_hook(copy)

        return keep

    handles = [layer.register_forward_hook(hook(name)) for name, layer in layers.items()]
    generator = torch.Generator().manual_seed(0)
    for window in windows:
        embedded = model.get_input_embeddings()(window).detach().requires_grad_()
        logits = model(inputs_embeds=embedded, use_cache=False).logits[0]
        drawn = logits.detach().softmax(-1).multinomial(1, generator=generator).flatten()
        functional.cross_entropy(logits, drawn, reduction="sum").backward()
        advance(window.numel())
    for handle in handles:
        handle.remove()
    ordered = [name for name in layers if name in gradients]
    return (
        {name: torch.cat(inputs[name]) for name in ordered},
        {name: torch.cat(gradients[name]) for name in ordered},
    )
