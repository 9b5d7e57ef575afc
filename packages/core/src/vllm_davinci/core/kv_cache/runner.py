"""vLLM's runner, with the layout of the KV cache that Ascend's operators read."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_davinci.core.attention.mla.cache import MLACache
from vllm_davinci.core.attention.paged import PagedCache
from vllm_davinci.core.components.fused_ops import fused_op
from vllm_davinci.core.errors import RELEASE, UnsupportedFeatureError


class KVCacheRunner(GPUModelRunner):
    """Allocates, zeroes and copies the blocks that vLLM plans."""

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """vLLM's, with heads of the size that the attention operator is called with."""
        specs: dict[str, KVCacheSpec] = super().get_kv_cache_spec()
        layers = self.compilation_config.static_forward_context
        for name, spec in specs.items():
            size = getattr(getattr(layers[name], "impl", None), "operator_head_size", None)
            if size is not None and isinstance(spec, AttentionSpec) and size != spec.head_size:
                specs[name] = replace(spec, head_size=size, head_size_v=size)
        return specs

    def initialize_kv_cache_tensors(
        self,
        kv_cache_config: KVCacheConfig,
        kernel_block_sizes: list[int],
        kv_cache_allocation_context: AbstractContextManager[None] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Allocates the cache vLLM planned, with each layer's keys and values apart.

        vLLM plans one allocation in which every layer has a contiguous region of
        num_blocks pages. The first part of a region holds the keys of all blocks, the second
        the values (with MLA: the kv_c rows, then the k_pe rows), so a block's
        bytes differ from vLLM's own views but belong to the same block of the same region; cache
        groups that overlay each other stay apart.

        Binds a PagedCache or a MLACache to every attention layer. Returns its first part per
        layer.
        """
        layers = self.compilation_config.static_forward_context
        caches: dict[str, PagedCache | MLACache] = {}
        if kv_cache_config.kv_cache_tensors:
            with kv_cache_allocation_context or nullcontext():
                size_bytes = kv_cache_config.kv_cache_tensors[0].size
                memory = torch.zeros(size_bytes, dtype=torch.int8, device=self.device)
            for placement in kv_cache_config.kv_cache_tensors:
                for index, layer_name in enumerate(placement.layers):
                    region = _layer_region(memory, placement, index, kv_cache_config.num_blocks)
                    spec, block_size = _spec_of(layer_name, kv_cache_config, kernel_block_sizes)
                    if isinstance(spec, MLAAttentionSpec):
                        layer = layers[layer_name]
                        caches[layer_name] = MLACache.in_region(
                            region.view(spec.dtype),
                            block_size,
                            layer.kv_lora_rank,
                            layer.qk_rope_head_dim,
                        )
                    else:
                        caches[layer_name] = _paged_cache(region, spec, block_size, layer_name)
        for layer_name, target_name in self.shared_kv_cache_layers.items():
            caches[layer_name] = caches[target_name]
        for layer_name, cache in caches.items():
            layers[layer_name].bind_kv_cache(cache)
            # vLLM copies blocks between these along dimension 0.
            self.kv_caches.extend(cache[:2])
        return {layer_name: cache[0] for layer_name, cache in caches.items()}

    def _init_kv_zero_meta(self) -> None:
        """Nothing to prepare: _zero_block_ids indexes the caches directly."""

    def _zero_block_ids(self, block_ids: list[int]) -> None:
        """Zeroes whole blocks of every layer's keys and values."""
        if not block_ids:
            return
        index = async_tensor_h2d(block_ids, self.device, torch.int64)
        for cache in self._caches_by_block():
            cache.index_fill_(0, index, 0)

    def _update_states(self, scheduler_output: SchedulerOutput) -> Callable[..., Any] | None:
        """Brings the batch up to date; blocks that requests get copies of are copied in one call.

        New blocks are zeroed first: a copy's target is one of them.
        """
        copies = scheduler_output.kv_cache_block_copies
        copy_blocks = fused_op("copy_kv_blocks") if copies else None
        if copy_blocks is not None:
            self._zero_block_ids(scheduler_output.new_block_ids_to_zero or [])
            copy_blocks(self._caches_by_block(), torch.tensor(copies))
            scheduler_output = replace(
                scheduler_output, new_block_ids_to_zero=None, kv_cache_block_copies=None
            )
        return super()._update_states(scheduler_output)

    def _caches_by_block(self) -> list[torch.Tensor]:
        """Every part of every layer's cache once, as [num_blocks, entries]."""
        caches = {cache.data_ptr(): cache for cache in self.kv_caches}
        return [cache.view(self.kv_cache_config.num_blocks, -1) for cache in caches.values()]


def _layer_region(
    memory: torch.Tensor, placement: KVCacheTensor, index: int, num_blocks: int
) -> torch.Tensor:
    start = placement.offset + index * placement.layer_stride
    return memory[start : start + num_blocks * placement.block_stride]


def _spec_of(
    layer_name: str, kv_cache_config: KVCacheConfig, kernel_block_sizes: list[int]
) -> tuple[KVCacheSpec, int]:
    """A layer's cache specification, and the block size its attention operator works with."""
    for group, kernel_block_size in zip(
        kv_cache_config.kv_cache_groups, kernel_block_sizes, strict=False
    ):
        if layer_name in group.layer_names:
            spec = group.kv_cache_spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                spec = spec.kv_cache_specs[layer_name]
            return spec, kernel_block_size
    raise AssertionError(f"{layer_name} is in no KV cache group")


def _paged_cache(
    region: torch.Tensor, spec: KVCacheSpec, block_size: int, layer_name: str
) -> PagedCache:
    if not isinstance(spec, AttentionSpec):
        raise UnsupportedFeatureError(
            f"Layer {layer_name} keeps a {type(spec).__name__} state, not keys and values. "
            f"{RELEASE} runs attention models only; choose another model."
        )
    if spec.head_size_v != spec.head_size or spec.page_size_bytes != spec.unpadded_page_size_bytes:
        raise UnsupportedFeatureError(
            f"Layer {layer_name} needs keys of {spec.head_size} and values of {spec.head_size_v} "
            f"entries in pages of {spec.page_size_bytes} bytes ({spec.unpadded_page_size_bytes} "
            f"without padding). {RELEASE} stores keys and values of one size in "
            "unpadded pages; choose another model."
        )
    shape = (-1, block_size, spec.num_kv_heads, spec.head_size)
    key, value = (half.view(spec.dtype).view(shape) for half in region.chunk(2))
    return PagedCache.of(key, value)
