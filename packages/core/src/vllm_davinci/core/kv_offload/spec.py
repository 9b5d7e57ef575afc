"""Offloading to host memory: vLLM's manager and metrics, with our transfers."""

from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.common import CPUOffloadingInfo
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.kv_offload.host_rows import slab_chunks
from vllm_davinci.core.kv_offload.transfers import HostOffloadingWorker


class NPUOffloadingSpec(CPUOffloadingSpec):
    """vLLM's CPU offloading, whose own worker supports only CUDA and XPU devices."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self._slabs: list[int] = []
        self._transfers: HostOffloadingWorker | None = None
        if not self.cpu_page_size_per_worker:
            return  # vLLM uses only the metrics
        num_ranks = config.parallel.world_size
        budget_bytes = int(self.extra_config["cpu_bytes_to_use"])
        self._slabs = slab_chunks(budget_bytes // num_ranks, self.cpu_page_size_per_worker)
        self.num_chunks = sum(self._slabs)
        self.cpu_info = CPUOffloadingInfo.from_config(
            config, self.num_chunks, self.kv_bytes_per_chunk
        )
        if not self.num_chunks:
            # Allocations of pinned memory are rounded up to a power of two.
            least_bytes = num_ranks << (self.cpu_page_size_per_worker - 1).bit_length()
            raise ConfigurationError(
                f"--kv-offloading-size of {budget_bytes / 2**30:g} GiB is too small for one block "
                f"of the KV cache, which takes {self.cpu_page_size_per_worker} bytes on each of "
                f"{num_ranks} ranks. Give at least {least_bytes / 2**30:g}."
            )

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._transfers is None:
            # Each rank pins its own memory.
            self._transfers = HostOffloadingWorker(kv_caches, self.blocks_per_chunk, self._slabs)
        return self._transfers
