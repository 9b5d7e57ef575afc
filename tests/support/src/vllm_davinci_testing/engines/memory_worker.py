"""Worker methods about device memory; vLLM makes the class a base of the worker."""

import torch


class MemoryWorker:
    """vLLM's HTTP server passes numbers as text."""

    def device_memory_bytes(self) -> int:
        """Returns the bytes of device memory in use by all processes."""
        free_bytes, total_bytes = torch.accelerator.get_memory_info()
        return total_bytes - free_bytes
