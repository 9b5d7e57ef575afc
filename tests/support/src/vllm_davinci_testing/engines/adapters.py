"""LoRA adapters with random weights in peft's format, and transformers' model with adapters."""

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

EXPERTS = r"\.experts\.\d+\.(gate|up|down)_proj$"
LINEAR = r"\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)$"
EVERYWHERE = LINEAR + r"|\.embed_tokens$|^lm_head$"
# Ratio of an adapter's delta to the output, in standard deviations: large enough to change text.
STRENGTH = 0.5


def write_adapter(
    network: nn.Module,
    directory: Path,
    rank: int,
    seed: int,
    targets: str = LINEAR,
    strength: float = STRENGTH,
    **config: Any,
) -> Path:
    """Writes an adapter for the layers of `network` with matching names; returns its directory.

    strength: with 0 every B is zero
    config:   additional fields of the adapter's configuration
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    names = set()
    for name, weight, is_embedding in _weights(network):
        if not re.search(targets, name):
            continue
        names.add(name.rpartition(".")[2])
        size_in, size_out = weight.shape if is_embedding else weight.shape[::-1]
        a = torch.randn(rank, size_in, generator=generator)
        b = torch.randn(size_out, rank, generator=generator)
        # Relative to outputs for inputs of standard deviation 1, as norms and embeddings give.
        b *= strength * float(weight.detach().std()) * math.sqrt(1 if is_embedding else size_in)
        b /= math.sqrt(rank) * 2  # alpha is twice the rank
        prefix = f"base_model.model.{name}"
        if is_embedding:
            tensors |= {f"{prefix}.lora_embedding_A": a, f"{prefix}.lora_embedding_B": b}
        else:
            a /= math.sqrt(size_in)
            tensors |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
    assert tensors, f"no layer is named like {targets}"
    write_files(directory, tensors, {"r": rank, "target_modules": sorted(names), **config})
    return directory


def _weights(network: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yields name and weight of all layers and each routed expert, and True for an embedding."""
    for name, layer in network.named_modules():
        if isinstance(layer, nn.Linear | nn.Embedding):
            yield name, layer.weight, isinstance(layer, nn.Embedding)
        elif _is_experts(layer):
            for number in range(len(layer.down_proj)):
                for projection in ("gate_proj", "up_proj", "down_proj"):
                    weight = _of_expert(layer, number, projection)
                    yield f"{name}.{number}.{projection}", weight, False


def _is_experts(layer: nn.Module) -> bool:
    """True for transformers' routed experts, which have one tensor per projection."""
    return isinstance(getattr(layer, "gate_up_proj", None), nn.Parameter)


def _of_expert(layer: Any, number: int, projection: str) -> torch.Tensor:
    """Returns a view of one expert's weight, [out, in]."""
    if projection == "down_proj":
        return layer.down_proj.data[number]
    return layer.gate_up_proj.data[number].chunk(2)[projection == "up_proj"]


def write_files(directory: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """Writes the two files of an adapter; `config` needs r and target_modules."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: each.contiguous() for name, each in tensors.items()}, directory / WEIGHTS)
    complete = {"peft_type": "LORA", "lora_alpha": 2 * config["r"], **config}
    (directory / CONFIG).write_text(json.dumps(complete))


WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def layer_names(directory: Path) -> set[str]:
    """Returns the layers that an adapter changes, by their names in the checkpoint."""
    suffixes = r"\.lora_([AB]\.weight|embedding_[AB])$"
    return {
        re.sub(suffixes, "", name).removeprefix("base_model.model.")
        for name in load_file(directory / WEIGHTS)
    }


@contextmanager
def adapted(network: nn.Module, directory: Path | None) -> Iterator[None]:
    """In this context, `network` computes y + B(A(x)) * alpha / r, like peft with an unmerged
    adapter.

    For routed experts the adapter is merged into the weights, because transformers has no layers
    for their products.
    """
    if directory is None:
        yield
        return
    tensors = load_file(directory / WEIGHTS)
    config = json.loads((directory / CONFIG).read_text())
    scaling = config["lora_alpha"] / config["r"]
    handles, replaced, undo = [], [], []
    for name in sorted(layer_names(directory)):
        prefix = f"base_model.model.{name}.lora_"
        if expert := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)", name):
            path, number, projection = expert.groups()
            layer = network.get_submodule(path)
            if not _is_experts(layer):  # an IntegerReference's experts, product by product
                pair = tensors[f"{prefix}A.weight"], tensors[f"{prefix}B.weight"]
                undo.append(_adapt_product(layer.products, int(number), projection, pair, scaling))
                continue
            weight = _of_expert(layer, int(number), projection)
            replaced.append((weight, weight.clone()))
            weight += tensors[f"{prefix}B.weight"] @ tensors[f"{prefix}A.weight"] * scaling
            continue
        layer = network.get_submodule(name)
        if isinstance(layer, nn.Embedding):
            pair = tensors[f"{prefix}embedding_A"], tensors[f"{prefix}embedding_B"]
            hook = _add_embedding
        else:
            pair = tensors[f"{prefix}A.weight"], tensors[f"{prefix}B.weight"]
            hook = _add_linear
        handles.append(layer.register_forward_hook(partial(hook, *pair, scaling)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for weight, original in replaced:
            weight.copy_(original)
        for each in reversed(undo):
            each()


@contextmanager
def through_peft(network: Any, directory: Path | None) -> Iterator[None]:
    """In this context, peft runs `network` with its unmerged adapter."""
    if directory is None:
        yield
        return
    from peft import PeftModel  # takes seconds, which tests with `adapted` need not wait for

    adapted_network = PeftModel.from_pretrained(network, directory)
    try:
        yield
    finally:
        adapted_network.unload()


def _adapt_product(
    products: list[Any],
    number: int,
    projection: str,
    pair: tuple[torch.Tensor, torch.Tensor],
    scaling: float,
) -> Callable[[], None]:
    """Adds a delta to one of an expert's products. Returns a function that removes it."""
    before = products[number]
    place = ("gate_proj", "up_proj", "down_proj").index(projection)
    base, (a, b) = before[place], pair
    adapted_one = lambda x: base(x) + x @ a.T @ b.T * scaling  # noqa: E731
    products[number] = (*before[:place], adapted_one, *before[place + 1 :])

    def undo() -> None:
        products[number] = before

    return undo


def _add_linear(
    a: torch.Tensor, b: torch.Tensor, scaling: float, _: Any, inputs: Any, y: torch.Tensor
) -> torch.Tensor:
    delta = inputs[0].to(a.dtype) @ a.T @ b.T * scaling
    return y + delta.to(y.dtype)


def _add_embedding(
    a: torch.Tensor, b: torch.Tensor, scaling: float, _: Any, inputs: Any, y: torch.Tensor
) -> torch.Tensor:
    return y + (a.T[inputs[0]] @ b.T * scaling).to(y.dtype)


def first_differences(
    reference: Any,
    adapters: Sequence[Path | None],
    prompts: Sequence[list[int]],
    outputs: Sequence[Any],
    under: Callable[[nn.Module, Path | None], AbstractContextManager[None]] = adapted,
) -> list[str]:
    """Describes requests whose tokens are not the greedy tokens with their adapter.

    under: `adapted`, or `through_peft`, which does not support routed experts
    """
    found = []
    for adapter, prompt, output in zip(adapters, prompts, outputs, strict=True):
        with under(reference.network, adapter):
            wrong = reference.first_difference(prompt, list(output.outputs[0].token_ids))
        if wrong is not None:
            found.append(f"{adapter and adapter.name}: {wrong}")
    return found
