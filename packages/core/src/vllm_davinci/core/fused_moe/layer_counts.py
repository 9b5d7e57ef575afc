"""Counts the layers that need resources of captured graphs."""

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec

from vllm_davinci.core.fused_moe.communication import CommunicationMethod
from vllm_davinci.core.fused_moe.method import NPUFusedMoEMethodBase
from vllm_davinci.core.graph.plan import LayerCounts


def layer_counts(
    model: torch.nn.Module, kv_cache_config: KVCacheConfig, embeds: bool
) -> LayerCounts:
    """Counts the layers of one rank. embeds: whether its pipeline stage embeds tokens"""
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    forwards = [
        method.moe_forward
        for method in methods
        if isinstance(method, NPUFusedMoEMethodBase) and method.moe_forward is not None
    ]
    are_fused = [
        forward.dispatchers.rule.choose(1).method is CommunicationMethod.FUSED
        for forward in forwards
        if forward.dispatchers is not None
    ]
    return LayerCounts(
        attention=sum(
            len(group.layer_names)
            for group in kv_cache_config.kv_cache_groups
            if not isinstance(group.kv_cache_spec, MambaSpec)  # states need no lengths
        ),
        embeds=embeds,
        widths=max(getattr(module, "num_graph_widths", 1) for module in model.modules()),
        experts=len(forwards),
        exchanging=are_fused.count(False),
        fused=are_fused.count(True),
        apart=sum(
            forward.shared is not None and forward.shared.reduces_apart for forward in forwards
        ),
    )
