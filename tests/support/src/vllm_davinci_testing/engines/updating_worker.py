"""Updates a worker's weights like trainers do; a base of the worker."""

import gc
from typing import Any

import torch

from vllm_davinci.core.attention.mla.layer import NPUMLAAttention
from vllm_davinci_testing.engines import weight_buckets


class UpdatingWorker:
    model_runner: Any
    local_rank: int
    device: Any

    def reload_from(self, checkpoint: str) -> None:
        """Reloads layer by layer, like vLLM."""
        self.model_runner.reload_weights(weights_path=checkpoint)

    def load_buckets(self, addresses: list[str]) -> None:
        """Loads bucket by bucket through the model's own loader, like verl."""
        for tensors in weight_buckets.receive(addresses[self.local_rank], self.device):
            self.model_runner.model.load_weights(tensors)

    def allocated_bytes(self) -> int:
        """Returns the bytes of device memory in tensors."""
        gc.collect()
        torch.accelerator.synchronize()
        return torch.accelerator.memory_allocated()

    def addresses(self) -> dict[str, int]:
        """Returns the addresses of parameters and derived tensors."""
        model = self.model_runner.get_model()
        found = {name: each.data_ptr() for name, each in model.named_parameters()}
        for name, layer in model.named_modules():
            if isinstance(layer, NPUMLAAttention):
                found |= {
                    f"{name}.{w}": getattr(layer.impl, w).data_ptr() for w in ("W_UK", "W_UV")
                }
            method = getattr(layer, "quant_method", None)
            if (view := getattr(method, "_weight_t", None)) is not None:
                found[f"{name}.transposed"] = view.data_ptr()
        return found
