"""The steps of vLLM's runner that the KV cache is part of."""

from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

from vllm_davinci.core.attention.block_table import map_slots_on_host
from vllm_davinci.core.expert_balance.runner import BalancingRunner
from vllm_davinci.core.kv_cache.memory import KVCacheMemory, first_part
from vllm_davinci.core.kv_cache.shared_pages import SLOTS_PER_KEY, address_pages, has_pages


class CachingRunner(BalancingRunner):
    """vLLM's runner, whose cache lies in our layout and whose slots are computed on the host."""

    _kv_cache_memory: KVCacheMemory

    def _take_kv_cache(self) -> None:
        """Prepares the cache's memory, and our slots for vLLM's batch. Comes after the drafter."""
        self._kv_cache_memory = KVCacheMemory(
            self.device, self.compilation_config.static_forward_context, self.kv_caches
        )
        self._map_slots()

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return self._kv_cache_memory.operator_specs(super().get_kv_cache_spec())

    def initialize_metadata_builders(
        self, kv_cache_config: KVCacheConfig, kernel_block_sizes: list[int]
    ) -> None:
        super().initialize_metadata_builders(kv_cache_config, kernel_block_sizes)
        address_pages(kv_cache_config, self.attn_groups, self.max_num_reqs, self.max_model_len)

    def may_reinitialize_input_batch(self, kv_cache_config: KVCacheConfig) -> None:
        super().may_reinitialize_input_batch(kv_cache_config)
        self._map_slots(SLOTS_PER_KEY if has_pages(kv_cache_config) else 1)

    def _map_slots(self, slots_per_token: int = 1) -> None:
        tokens = (self.req_indices, self.query_pos, self._rejected.counts)
        map_slots_on_host(self.input_batch, *tokens, slots_per_token)

    def initialize_kv_cache_tensors(
        self,
        kv_cache_config: KVCacheConfig,
        kernel_block_sizes: list[int],
        kv_cache_allocation_context: AbstractContextManager[None] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Allocates the cache in our layout. Returns its first part per layer."""
        caches = self._kv_cache_memory.allocate(
            kv_cache_config,
            kernel_block_sizes,
            self.shared_kv_cache_layers,
            kv_cache_allocation_context,
        )
        return {name: first_part(cache) for name, cache in caches.items()}

    def _init_kv_zero_meta(self) -> None:
        """Nothing to prepare: `_zero_block_ids` indexes the caches directly."""

    def _with_blocks_copied(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        """Copies the blocks of a step, and zeroes others. Returns what is left to vLLM."""
        copies = scheduler_output.kv_cache_block_copies
        zeroed = scheduler_output.new_block_ids_to_zero or []
        if not copies or not self._kv_cache_memory.copy(copies, zeroed):
            return scheduler_output
        return replace(scheduler_output, new_block_ids_to_zero=None, kv_cache_block_copies=None)

    def _zero_block_ids(self, block_ids: list[int]) -> None:
        self._kv_cache_memory.zero(block_ids)
