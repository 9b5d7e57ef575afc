"""A worker that sleeps and reports its device memory; vLLM makes the class a base of the worker."""

from pathlib import Path
from typing import Any

import torch

from vllm_davinci.core.device.sleeping_memory import sleeping_memory
from vllm_davinci_testing.engines.weight_buckets import tensors_of


class SleepingWorker:
    model_runner: Any

    def memory(self) -> dict[str, int]:
        """Returns the device's free memory, and what each pool has mapped, in bytes."""
        free_bytes, _ = torch.accelerator.get_memory_info()
        return {"free": free_bytes, **sleeping_memory().mapped_bytes()}

    def weight_bytes(self) -> int:
        """Returns the bytes of all parameters."""
        found = {
            each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
            for each in self.model_runner.get_model().parameters()
        }
        return sum(found.values())

    def load_from(self, checkpoint: str) -> None:
        """Loads like a trainer's extension: through the model's own loader, into fixed memory."""
        self.model_runner.model.load_weights(tensors_of(Path(checkpoint)))
