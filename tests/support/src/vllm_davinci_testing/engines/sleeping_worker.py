"""Answers of a worker about its device memory; vLLM makes the class a base of the worker."""

from __future__ import annotations

from typing import Any

import torch

from vllm_davinci.core.device.sleeping_memory import sleeping_memory


class SleepingWorker:
    model_runner: Any

    def memory(self) -> dict[str, int]:
        """Bytes: what the device has free, and what each pool has mapped."""
        free_bytes, _ = torch.accelerator.get_memory_info()
        return {"free": free_bytes, **sleeping_memory().mapped_bytes()}

    def weight_bytes(self) -> int:
        """Bytes of all parameters."""
        found = {
            each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
            for each in self.model_runner.get_model().parameters()
        }
        return sum(found.values())
