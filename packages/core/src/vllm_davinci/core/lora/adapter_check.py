"""Checks, tensor by tensor, that an adapter fits the model's layers."""

from collections.abc import Mapping

import torch
from torch import nn
from vllm.lora.layers import (
    FusedMoEWithLoRA,
    LogitsProcessorWithLoRA,
    VocabParallelEmbeddingWithLoRA,
)
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear
from vllm.model_executor.models.utils import PPMissingLayer

MOST_NAMED = 3  # layers named in one error


def reasons_against(
    adapter: LoRAModel,
    model: nn.Module,
    layers: Mapping[str, BaseLayerWithLoRA],
    packed: Mapping[str, list[str]],
    max_rank: int,
) -> list[str]:
    """Reasons why the adapter cannot be served, layer by layer; empty if it can.

    layers: those that accept adapters, by name
    packed: name of such a layer -> checkpoint names of its parts
    Layers of other pipeline stages are checked there.
    """
    sizes: dict[str, tuple[int, int]] = {}
    for name, layer in layers.items():
        sizes |= dict(zip(packed.get(name, [name]), _sizes(layer), strict=False))
    reasons = []
    for name, weights in adapter.loras.items():
        if name in sizes:
            against = _misfit(weights, *sizes[name], max_rank)
        elif _is_on_another_stage(model, name):
            against = None
        else:
            against = f"no layer here accepts an adapter of this name ({_class_of(model, name)})"
        if against is not None:
            reasons.append(f"{name}: {against}")
    return reasons


def complete_experts(
    adapter: LoRAModel, layers: Mapping[str, BaseLayerWithLoRA], packed: Mapping[str, list[str]]
) -> None:
    """Fills in zeros for experts that the adapter omits: vLLM requires all experts or none.

    Only for experts of this rank: no others are read.
    """
    for name, layer in layers.items():
        if not isinstance(layer, FusedMoEWithLoRA):
            continue
        parts = dict(zip(packed[name], _sizes(layer), strict=True))
        given = [adapter.loras[part] for part in parts if part in adapter.loras]
        if not given:
            continue
        like = given[0].lora_a
        for part, (size_in, size_out) in parts.items():
            adapter.loras.setdefault(
                part,
                LoRALayerWeights(
                    part,
                    given[0].rank,
                    given[0].lora_alpha,
                    like.new_zeros(given[0].rank, size_in),
                    like.new_zeros(size_out, given[0].rank),
                ),
            )


def told(reasons: list[str]) -> str:
    """One line that names the first layers."""
    more = f"; and {len(reasons) - MOST_NAMED} more layers" if len(reasons) > MOST_NAMED else ""
    return "; ".join(reasons[:MOST_NAMED]) + more


def _sizes(layer: BaseLayerWithLoRA) -> list[tuple[int, int]]:
    """Input and output features of the whole layer over all ranks, per part of a packed one."""
    if isinstance(layer, LogitsProcessorWithLoRA):
        return [(layer.hidden_size, layer.base_layer.vocab_size)]
    if isinstance(layer, FusedMoEWithLoRA):
        hidden, size = layer.hidden_size, layer.moe_config.intermediate_size
        return [(hidden, size), (size, hidden), (hidden, size)] * layer.global_num_experts
    base = layer.base_layer
    if isinstance(layer, VocabParallelEmbeddingWithLoRA):
        return [(base.org_vocab_size, base.embedding_dim)]
    if isinstance(base, QKVParallelLinear):
        heads, kv_heads = base.total_num_heads, base.total_num_kv_heads
        outs = [heads * base.head_size, kv_heads * base.head_size, kv_heads * base.v_head_size]
    elif isinstance(base, MergedColumnParallelLinear):
        outs = list(base.output_sizes)
    else:
        outs = [base.output_size]
    return [(base.input_size, out) for out in outs]


def _misfit(weights: LoRALayerWeights, size_in: int, size_out: int, max_rank: int) -> str | None:
    a, b = weights.lora_a, weights.lora_b
    if a is None or b is None:
        return f"lora_{'A' if a is None else 'B'} is missing"
    rank = a.shape[0]
    if rank > max_rank:
        return f"rank {rank} is above {max_rank} (--max-lora-rank)"
    shapes = tuple(a.shape), tuple(b.shape)
    if shapes != ((rank, size_in), (size_out, rank)):
        return (
            f"shapes {list(shapes[0])} and {list(shapes[1])}; the layer needs [rank, {size_in}] "
            f"and [{size_out}, rank]"
        )
    # A step multiplies with all slots, then zeroes other requests' columns: 0 * inf is not 0.
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        return "values that are not finite"
    return None


def _is_on_another_stage(model: nn.Module, name: str) -> bool:
    module: nn.Module = model
    for part in name.split("."):
        if isinstance(module, PPMissingLayer):
            return True
        child = getattr(module, part, None)
        if not isinstance(child, nn.Module):
            return False
        module = child
    return isinstance(module, PPMissingLayer)


def _class_of(model: nn.Module, name: str) -> str:
    try:
        return type(model.get_submodule(name)).__name__
    except AttributeError:
        return "the model has none"
