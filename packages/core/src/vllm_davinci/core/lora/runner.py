"""Loads the model's adapters in a runner: wraps the layers that support them."""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models import supports_lora
from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

from vllm_davinci.core.errors import UnsupportedFeatureError
from vllm_davinci.core.lora.adapter_manager import NPUWorkerLoRAManager


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
