"""vLLM's adapter managers, with our weight layout and a check of every tensor."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LRUCacheLoRAModelManager
from vllm.lora.request import LoRARequest
from vllm.lora.utils import is_supported_lora_module
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.model_executor.layers.fused_moe import MoERunner
from vllm.model_executor.layers.linear import MergedColumnParallelLinear

from vllm_davinci.core.errors import RELEASE, ConfigurationError, UnsupportedFeatureError
from vllm_davinci.core.log import init_logger
from vllm_davinci.core.lora.adapter_check import complete_experts, reasons_against, told
from vllm_davinci.core.lora.base_weights import load_past_wrappers
from vllm_davinci.core.lora.routed_experts import reason_against_experts
from vllm_davinci.core.lora.stacked_weights import stack_weights
from vllm_davinci.core.lora.wrapping import connect_attention, wrap_others

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
