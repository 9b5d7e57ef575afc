"""vLLM's managers of adapters, with our layout of weights and a check of every tensor."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LRUCacheLoRAModelManager
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from vllm_davinci.core.config.lora import ROUTED_EXPERTS
from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.log import init_logger
from vllm_davinci.core.lora.adapter_check import reasons_against, told
from vllm_davinci.core.lora.stacked_weights import stack_weights

logger = init_logger(__name__)


class NPULoRAModelManager(LRUCacheLoRAModelManager):
    """Wraps the model's layers, and holds the adapters in host memory and in slots."""

    def _create_lora_modules(self) -> None:
        """vLLM's, without routed experts: an adapter that has them is refused by their names."""
        self.supported_lora_modules: list[str] = [
            name for name in self.supported_lora_modules if name != ROUTED_EXPERTS
        ]
        super()._create_lora_modules()

    def register_module(self, module_name: str, module: BaseLayerWithLoRA) -> None:
        super().register_module(module_name, module)
        stack_weights(module)


class NPUWorkerLoRAManager(LRUCacheWorkerLoRAManager):
    """Loads adapters for one worker. None is served whose tensors would not all be used."""

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
        return adapter

    @contextmanager
    def logits_of(self, adapter_id: int) -> Iterator[None]:
        """Inside, all rows whose logits are computed are of this adapter; 0 for none."""
        manager = self._adapter_manager
        slot = manager.lora_index_to_id.index(adapter_id) if adapter_id else -1
        with ExitStack() as stack:
            for wrapper in manager.punica_wrapper_mapping.values():
                stack.enter_context(wrapper.of_one_slot(slot))
            yield
