"""Which weights a decode fetches before which sum over ranks: those of the layer after it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from vllm_davinci.core.attention.mla.layer import NPUMLAAttention
from vllm_davinci.core.config.options import WeightPrefetchConfig
from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.config.side_streams import PREFETCH, prefetch_scheduler
from vllm_davinci.core.fused_moe.method import NPUFusedMoEMethodBase
from vllm_davinci.core.layers.prefetch import Ahead, WeightPrefetch
from vllm_davinci.core.log import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)


def plan_prefetches(vllm_config: "VllmConfig") -> int:
    """Tells each layer what to fetch for the next one. Call it when all weights are in place.

    Returns the number of layers that do; 0 where the option is off.
    """
    scheduler = prefetch_scheduler(vllm_config)
    if scheduler is None:
        return 0
    options = get_config(vllm_config).weight_prefetch_config
    # In the order of the model; dense layers have an entry for attention alone.
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
        return 0
    for number, layer in enumerate(layers):
        is_last = number == len(ahead)
        weights = [] if is_last else ahead[number]
        step = WeightPrefetch(scheduler, weights, attention, is_last)
        if isinstance(layer, NPUMLAAttention):
            layer.weight_prefetch = step
            layer.preprocess.is_prefetched = number > 0 and bool(ahead[number - 1])
        else:
            method = layer.routed_experts.quant_method
            assert isinstance(method, NPUFusedMoEMethodBase) and method.moe_forward is not None
            method.moe_forward = replace(method.moe_forward, weight_prefetch=step)
    return sum(map(bool, ahead))


def _weights_of(layer: NPUMLAAttention | MoERunner, options: WeightPrefetchConfig) -> list[Ahead]:
    is_attention = isinstance(layer, NPUMLAAttention)
    found = list(_of_attention(layer, options) if is_attention else _of_experts(layer, options))
    return found if sum(ahead.num_bytes for ahead in found) >= options.min_bytes else []


def _of_attention(layer: NPUMLAAttention, options: WeightPrefetchConfig) -> Iterator[Ahead]:
    modules, ratio = layer.preprocess.modules, options.prefetch_ratio.attn
    down = (modules.fused_qkv_a_proj, modules.kv_a_proj_with_mqa)
    up = modules.q_proj if layer.preprocess.q_lora_rank is None else modules.q_b_proj
    for module in (*down, up):
        yield from _ahead(_weight(module), ratio.qkv, options)
    yield from _ahead(layer.impl.W_UK, ratio.qkv, options)
    yield from _ahead(layer.impl.W_UV, ratio.o, options)
    yield from _ahead(_weight(modules.o_proj), ratio.o, options)


def _of_experts(runner: MoERunner, options: WeightPrefetchConfig) -> Iterator[Ahead]:
    ratio = options.prefetch_ratio.moe.gate_up
    yield from _ahead(_weight(runner.gate), ratio, options)
    if runner.shared_experts is not None:
        shared: Any = runner.shared_experts._layer
        for module in shared.modules():
            yield from _ahead(_weight(module), ratio, options)
    yield from _ahead(_weight(runner.routed_experts, "w13_weight"), ratio, options)


def _weight(module: Any, name: str = "weight") -> torch.Tensor | None:
    """None without such a module, and for the formats that store it under another name."""
    weight = getattr(module, name, None)
    return weight if isinstance(weight, torch.Tensor) else None


def _ahead(
    weight: torch.Tensor | None, ratio: float, options: WeightPrefetchConfig
) -> Iterator[Ahead]:
    if weight is None:
        return
    num_bytes = min(int(weight.untyped_storage().nbytes() * ratio), options.max_bytes)
    if num_bytes > 0:
        yield Ahead(weight.detach(), num_bytes)
