"""Prefetch of the next layer's weights during an all-reduce of a decode step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.models.utils import extract_layer_index

from vllm_davinci.core.attention.mla.layer import NPUMLAAttention
from vllm_davinci.core.config.options import WeightPrefetchConfig
from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.config.side_streams import PREFETCH, side_stream
from vllm_davinci.core.config.sized_choices import PREFETCH_BYTES, SizedChoices
from vllm_davinci.core.config.step_costs import costs_file
from vllm_davinci.core.fused_moe.method import NPUFusedMoEMethodBase
from vllm_davinci.core.layers.prefetch import Ahead, PrefetchLimit, WeightPrefetch
from vllm_davinci.core.log import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)


@dataclass(frozen=True)
class Prefetches:
    """All prefetches of a model.

    steps: number of each layer and its prefetch, in the model's order
    limit: largest prefetch of one weight, in bytes
    """

    steps: Sequence[tuple[int, WeightPrefetch]]
    limit: PrefetchLimit

    def end_with(self, num_layers: int | None) -> None:
        """Prefetches only in the first `num_layers` layers, the ones that run; None: in all."""
        running = [step for layer, step in self.steps if num_layers is None or layer < num_layers]
        for _, step in self.steps:
            step.is_last = step is running[-1]


def plan_prefetches(vllm_config: "VllmConfig") -> Prefetches | None:
    """Sets each layer's prefetch for the next one. Call it after all weights are loaded.

    Returns None if the option is off or no layer prefetches.
    """
    scheduler = side_stream(vllm_config, PREFETCH)
    if scheduler is None:
        return None
    options = get_config(vllm_config).weight_prefetch_config
    # In model order; dense layers have an entry for attention only.
    layers = [
        layer
        for layer in vllm_config.compilation_config.static_forward_context.values()
        if isinstance(layer, NPUMLAAttention | MoERunner)
    ]
    attention = next(layer for layer in layers if isinstance(layer, NPUMLAAttention)).layer_name
    ahead = [_weights_of(layer, options) for layer in layers[1:]]
    if not any(ahead):
        logger.warning_once(
            "additional_config key %r has no effect: no layer reads %d bytes of weights "
            "(weight_prefetch_config.min_bytes).",
            PREFETCH,
            options.min_bytes,
        )
        return None
    limit, steps = _limit(vllm_config), []
    for number, layer in enumerate(layers):
        is_last = number == len(ahead)
        weights = [] if is_last else ahead[number]
        step = WeightPrefetch(scheduler, weights, attention, limit, is_last)
        steps.append((extract_layer_index(layer.layer_name), step))
        if isinstance(layer, NPUMLAAttention):
            layer.weight_prefetch = step
            layer.preprocess.fetched_by = steps[number - 1][1] if number > 0 else None
        else:
            method = layer.routed_experts.quant_method
            assert isinstance(method, NPUFusedMoEMethodBase) and method.moe_forward is not None
            method.moe_forward = replace(method.moe_forward, weight_prefetch=step)
    return Prefetches(steps, limit)


def _limit(vllm_config: "VllmConfig") -> PrefetchLimit:
    """The limit: `max_bytes` if given, otherwise the choice in this engine's step times."""
    config = get_config(vllm_config)
    options = config.weight_prefetch_config
    is_given = "max_bytes" in options.model_fields_set
    file = None if is_given else costs_file(config)
    return PrefetchLimit(options.max_bytes, SizedChoices.read(file, "decodes", PREFETCH_BYTES))


def _weights_of(layer: NPUMLAAttention | MoERunner, options: WeightPrefetchConfig) -> list[Ahead]:
    is_attention = isinstance(layer, NPUMLAAttention)
    found = list(_of_attention(layer, options) if is_attention else _of_experts(layer, options))
    return found if sum(ahead.num_bytes for ahead in found) >= options.min_bytes else []


def _of_attention(layer: NPUMLAAttention, options: WeightPrefetchConfig) -> Iterator[Ahead]:
    modules, ratio = layer.preprocess.modules, options.prefetch_ratio.attn
    down = (modules.fused_qkv_a_proj, modules.kv_a_proj_with_mqa)
    up = modules.q_proj if layer.preprocess.q_lora_rank is None else modules.q_b_proj
    for module in (*down, up):
        yield from _ahead(_weight(module), ratio.qkv)
    yield from _ahead(layer.impl.W_UK, ratio.qkv)
    yield from _ahead(layer.impl.W_UV, ratio.o)
    yield from _ahead(_weight(modules.o_proj), ratio.o)


def _of_experts(runner: MoERunner, options: WeightPrefetchConfig) -> Iterator[Ahead]:
    ratio = options.prefetch_ratio.moe.gate_up
    yield from _ahead(_weight(runner.gate), ratio)
    if runner.shared_experts is not None:
        shared: Any = runner.shared_experts._layer
        for module in shared.modules():
            yield from _ahead(_weight(module), ratio)
    yield from _ahead(_weight(runner.routed_experts, "w13_weight"), ratio)


def _weight(module: Any, name: str = "weight") -> torch.Tensor | None:
    """The weight; None without such a module, and in formats that store it under another name."""
    weight = getattr(module, name, None)
    return weight if isinstance(weight, torch.Tensor) else None


def _ahead(weight: torch.Tensor | None, ratio: float) -> Iterator[Ahead]:
    if weight is None:
        return
    num_bytes = int(weight.untyped_storage().nbytes() * ratio)
    if num_bytes > 0:
        yield Ahead(weight.detach(), num_bytes)
