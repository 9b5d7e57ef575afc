"""vLLM's adapter managers, with our weight layout and a check of every tensor.

New weights are loaded past the wrappers of layers: vLLM's models find parameters by checkpoint
names, into which a wrapper inserts `base_layer`: some loaders look through wrappers, others raise
KeyError. Trainers that know of wrappers insert `base_layer` themselves (verl), and the former
loaders do not find those names.

Layers that vLLM's own search skips are wrapped here: vLLM wraps instances of the linear classes
that a platform registers. Its models' own subclasses of linear layers are not among them, and its
wrapper of routed experts needs a kernel.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from vllm.config import VllmConfig
from vllm.config.lora import LoRAConfig
from vllm.lora.layers import (
    LogitsProcessorWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    ReplicatedLinearWithLoRA,
)
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LRUCacheLoRAModelManager
from vllm.lora.request import LoRARequest
from vllm.lora.utils import is_supported_lora_module
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.model_executor.layers.fused_moe import MoERunner
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, ReplicatedLinear
from vllm.model_executor.models import supports_lora
from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

from vllm_davinci.core.attention.mla.adapters import UpProjectionAdapters
from vllm_davinci.core.attention.mla.block import NPUMultiHeadLatentAttentionWrapper
from vllm_davinci.core.errors import RELEASE, ConfigurationError, UnsupportedFeatureError
from vllm_davinci.core.layers.linear import NPUMergedColumnParallelLinear, NPUReplicatedLinear
from vllm_davinci.core.log import init_logger
from vllm_davinci.core.lora.adapter_check import complete_experts, reasons_against, told
from vllm_davinci.core.lora.punica import NPUPunicaWrapper
from vllm_davinci.core.lora.routed_experts import NPUFusedMoEWithLoRA, reason_against_experts
from vllm_davinci.core.lora.stacked_weights import StackedSlices, stack_weights

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


logger = init_logger(__name__)

# The layer's name in vLLM's models.
ROUTED_EXPERTS = "experts"


class NPULoRAModelManager(LRUCacheLoRAModelManager):
    """Wraps the model's layers and stores the adapters in host memory and in slots."""

    modules: dict[str, BaseLayerWithLoRA]

    def _create_lora_modules(self) -> None:
        """vLLM's method, after wrapping the layers it skips. An adapter for an unsupported layer is
        refused by the layer's name."""
        self._leave_out_experts()
        wrap_others(self.model, self._takes_adapters, self.lora_config, self.model.config)
        super()._create_lora_modules()
        load_past_wrappers(self.model)
        layers = self.modules
        for wrapper in self.punica_wrapper_mapping.values():
            refused = connect_attention(self.model, wrapper)
            layers = {name: each for name, each in layers.items() if each not in refused}
        self.modules = layers

    def _leave_out_experts(self) -> None:
        """Excludes routed experts unless all layers' experts support adapters."""
        reason = self._reason_against_experts()
        if reason is None:
            return
        targets = self.lora_config.target_modules or ()
        if ROUTED_EXPERTS in targets:
            raise UnsupportedFeatureError(
                f"--lora-target-modules {ROUTED_EXPERTS} (adapters of routed experts) is not "
                f"supported in {RELEASE}, because {reason}."
            )
        logger.info("Adapters of routed experts are refused: %s.", reason)
        self.supported_lora_modules: list[str] = [
            name for name in self.supported_lora_modules if name != ROUTED_EXPERTS
        ]

    def _reason_against_experts(self) -> str | None:
        runners = [each for each in self.model.modules() if isinstance(each, MoERunner)]
        if runners and self._is_3d_moe_model:
            return f"checkpoints of {type(self.model).__name__} have one tensor of all experts"
        reasons = {each.layer_name: reason_against_experts(each) for each in runners}
        named = [f"{name}: {reason}" for name, reason in reasons.items() if reason is not None]
        return named[0] if named else None

    def _takes_adapters(self, name: str, layer: nn.Module) -> bool:
        """True if adapters of this layer are requested, by vLLM's rules for wrapped layers."""
        if isinstance(layer, MergedColumnParallelLinear):
            parts = self.packed_modules_mapping.get(name.rpartition(".")[2], ())
            if len(parts) != len(layer.output_sizes):
                return False  # an adapter's tensors cannot be assigned to parts
        if self.lora_config.target_modules is None:
            return bool(is_supported_lora_module(name, layer, self.supported_lora_modules))
        return bool(self._match_target_modules(name))

    def register_module(self, module_name: str, module: BaseLayerWithLoRA) -> None:
        super().register_module(module_name, module)
        stack_weights(module)


class NPUWorkerLoRAManager(LRUCacheWorkerLoRAManager):
    """Loads adapters for one worker. Refuses an adapter unless all its tensors would be used."""

    _manager_cls = NPULoRAModelManager

    def _load_adapter(self, lora_request: LoRARequest) -> LoRAModel:
        adapter = super()._load_adapter(lora_request)
        manager = self._adapter_manager
        reasons = reasons_against(
            adapter,
            manager.model,
            manager.modules,
            manager.packed_modules,
            self.lora_config.max_lora_rank,
        )
        if reasons:
            raise ConfigurationError(
                f"The adapter {lora_request.lora_name!r} ({lora_request.lora_path}) does not fit: "
                f"{told(reasons)}."
            )
        logger.info("Adapter %s: %d layers.", lora_request.lora_name, len(adapter.loras))
        complete_experts(adapter, manager.modules, manager.packed_modules)
        return adapter

    @contextmanager
    def logits_of(self, adapter_id: int) -> Iterator[None]:
        """Inside, all rows whose logits are computed use this adapter; 0 for none."""
        manager = self._adapter_manager
        slot = manager.lora_index_to_id.index(adapter_id) if adapter_id else -1
        with ExitStack() as stack:
            for wrapper in manager.punica_wrapper_mapping.values():
                stack.enter_context(wrapper.of_one_slot(slot))
            yield


class AdapterRunner(LoRAModelRunnerMixin):
    """Mix-in ahead of vLLM's runner."""

    lora_manager: NPUWorkerLoRAManager

    def load_lora_model(
        self, model: torch.nn.Module, vllm_config: VllmConfig, device: torch.device
    ) -> torch.nn.Module:
        """Wraps the layers that support adapters. Returns the model."""
        if not supports_lora(model):
            raise UnsupportedFeatureError(
                f"{type(model).__name__} does not support LoRA in vLLM. Start without "
                "--enable-lora."
            )
        embedding: Any = model
        self.lora_manager = NPUWorkerLoRAManager(vllm_config, device, embedding.embedding_modules)
        wrapped: torch.nn.Module = self.lora_manager.create_lora_manager(model, vllm_config)
        return wrapped
