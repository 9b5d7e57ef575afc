"""Wraps the layers that vLLM's own search skips.

vLLM wraps instances of the linear classes that a platform registers. Its models' own subclasses of
linear layers are not among them, and its wrapper of routed experts needs a kernel.
"""

from collections.abc import Callable

from torch import nn
from transformers import PreTrainedConfig
from vllm.config.lora import LoRAConfig
from vllm.lora.layers import MergedColumnParallelLinearWithLoRA, ReplicatedLinearWithLoRA
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.model_executor.layers.fused_moe import MoERunner
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, ReplicatedLinear

from vllm_davinci.core.attention.mla.adapters import UpProjectionAdapters
from vllm_davinci.core.attention.mla.block import NPUMultiHeadLatentAttentionWrapper
from vllm_davinci.core.layers.linear import NPUMergedColumnParallelLinear, NPUReplicatedLinear
from vllm_davinci.core.lora.punica import NPUPunicaWrapper
from vllm_davinci.core.lora.routed_experts import NPUFusedMoEWithLoRA
from vllm_davinci.core.lora.stacked_weights import StackedSlices


def wrap_others(
    model: nn.Module,
    takes_adapters: Callable[[str, nn.Module], bool],
    lora_config: LoRAConfig,
    model_config: PreTrainedConfig,
) -> None:
    """Wraps these layers of `model` in place.

    takes_adapters: by a layer's full name, and the layer
    """
    wrappers: dict[int, BaseLayerWithLoRA] = {}
    for name, layer in model.named_modules(remove_duplicate=False):
        kind = _wrapper_of(layer)
        if kind is not None and id(layer) not in wrappers and takes_adapters(name, layer):
            wrapper = kind(layer)
            wrapper.create_lora_weights(lora_config.max_loras, lora_config, model_config)
            wrappers[id(layer)] = wrapper
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if id(child) in wrappers:
                setattr(parent, name, wrappers[id(child)])


def _wrapper_of(layer: nn.Module) -> Callable[[nn.Module], BaseLayerWithLoRA] | None:
    found: type[BaseLayerWithLoRA] | None = None
    if isinstance(layer, MoERunner):
        found = NPUFusedMoEWithLoRA
    elif isinstance(layer, MergedColumnParallelLinear):
        if not isinstance(layer, NPUMergedColumnParallelLinear):
            found = MergedColumnParallelLinearWithLoRA
    elif isinstance(layer, ReplicatedLinear) and not isinstance(layer, NPUReplicatedLinear):
        found = ReplicatedLinearWithLoRA
    return found


def connect_attention(model: nn.Module, step: NPUPunicaWrapper) -> list[BaseLayerWithLoRA]:
    """Makes MLA blocks compute with their wrapped projections. Call it after all are wrapped.

    Returns wrappers that must not have an adapter: attention adds a norm's bias as transformed by
    the base weight of kv_b_proj.
    """
    refused: list[BaseLayerWithLoRA] = []
    for block in model.modules():
        if isinstance(block, NPUMultiHeadLatentAttentionWrapper):
            has_bias = block.kv_a_layernorm.loaded_bias is not None
            if has_bias and isinstance(block.kv_b_proj, BaseLayerWithLoRA):
                refused.append(block.kv_b_proj)
            block.take_adapters(step, None if has_bias else _up_projection(block, step))
    return refused


def _up_projection(
    block: NPUMultiHeadLatentAttentionWrapper, step: NPUPunicaWrapper
) -> UpProjectionAdapters | None:
    layer = block.kv_b_proj
    if not isinstance(layer, BaseLayerWithLoRA):
        return None
    a, b = layer.lora_a_stacked, layer.lora_b_stacked
    assert isinstance(a, StackedSlices) and isinstance(b, StackedSlices)
    by_head = b.matrix.unflatten(0, (block.num_heads, -1))
    return UpProjectionAdapters(step, a.matrix, by_head, block.qk_nope_head_dim)
