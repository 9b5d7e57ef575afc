"""Memory of the KV cache, in the layout of Ascend's operators."""

from collections.abc import Mapping, Sequence
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
    MambaSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from vllm_davinci import operators
from vllm_davinci.core.attention.block_sparse.cache import BlockSparseCache
from vllm_davinci.core.attention.block_sparse.layer import BlockSparseAttention
from vllm_davinci.core.attention.compressed.row_cache import RowCache, RowCacheLayer
from vllm_davinci.core.attention.mla.cache import MLACache
from vllm_davinci.core.attention.paged_cache import PagedCache
from vllm_davinci.core.components.fused_ops import fused_op
from vllm_davinci.core.errors import RELEASE, UnsupportedFeatureError
from vllm_davinci.core.kv_cache.shared_pages import (
    has_pages,
    latent_sizes,
    paged_cache_in_pages,
    state_parts,
)
from vllm_davinci.core.linear_attention.state_pages import PackedStatePages, StatePages

LayerCache = PagedCache | BlockSparseCache | MLACache | StatePages | RowCache


# Most runs of blocks that are zeroed one by one; for more, an operator goes over all memory.
MOST_RUNS = 64


class KVCacheMemory:
    """Lays out, zeroes and copies the blocks that vLLM plans.

    layers: name -> layer with a cache
    parts:  vLLM's list of all caches' parts: filled here, cleared by vLLM, which copies blocks
            between them along dimension 0
    """

    def __init__(
        self, device: torch.device, layers: Mapping[str, Any], parts: list[torch.Tensor]
    ) -> None:
        self._device = device
        self._layers = layers
        self._parts = parts
        self._num_blocks = 0

    def operator_specs(self, specs: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
        """vLLM's specifications, with head sizes padded for the operator.

        Row kinds with larger pages come first, so that pages in a block begin at multiples of their
        size.
        """
        sized = dict(specs)
        for name, spec in specs.items():
            size = getattr(getattr(self._layers[name], "impl", None), "operator_head_size", None)
            if size is not None and isinstance(spec, AttentionSpec) and size != spec.head_size:
                sized[name] = replace(spec, head_size=size, head_size_v=size)
        if any(isinstance(self._layers[name], RowCacheLayer) for name in sized):
            by_size = sorted(sized.items(), key=lambda each: -each[1].page_size_bytes)
            return dict(by_size)
        return sized

    def bind(
        self,
        memory: torch.Tensor | None,
        kv_cache_config: KVCacheConfig,
        kernel_block_sizes: list[int],
        shared_layers: Mapping[str, str],
    ) -> dict[str, LayerCache]:
        """Divides a plan's allocation among the layers.

        vLLM plans one allocation in which every layer has a contiguous region of num_blocks pages.
        The first part of a region holds the keys of all blocks, the second the values (with MLA:
        kv_c rows, k_pe rows, an indexer's rows). A block occupies other bytes of its region than in
        vLLM's views, but every cache group divides the region in this way, so groups stay separate.
        If some groups hold recurrent state, a page holds a block's keys and its values; with MLA a
        state is spread over the block's bytes in each part (`shared_pages`). Row caches
        are packed: the pages of all layers of a group form one block after another
        (`attention.compressed.row_cache`).

        memory:        [bytes], int8; None without layers
        shared_layers: layer -> the layer whose cache it shares
        Returns each layer's cache.
        """
        caches: dict[str, LayerCache] = {}
        whole: list[torch.Tensor] = []
        if memory is not None:
            if self._is_packed(kv_cache_config):
                caches, whole = self._packed(memory, kv_cache_config), [memory]
            else:
                caches, whole = self._in_regions(memory, kv_cache_config, kernel_block_sizes)
        for layer_name, target_name in shared_layers.items():
            caches[layer_name] = caches[target_name]
        for layer_name, cache in caches.items():
            self._layers[layer_name].bind_kv_cache(cache)
            if not whole:
                self._parts.extend(cache.parts)
        # In words of 4 bytes, because the operator that fills blocks does not support int8.
        self._parts.extend(
            each.view(torch.int32).view(kv_cache_config.num_blocks, -1) for each in whole
        )
        self._num_blocks = kv_cache_config.num_blocks
        return caches

    def _is_packed(self, kv_cache_config: KVCacheConfig) -> bool:
        layers = [self._layers[name] for name in _planned_layers(kv_cache_config)]
        return any(isinstance(layer, RowCacheLayer) for layer in layers)

    def _packed(
        self, memory: torch.Tensor, kv_cache_config: KVCacheConfig
    ) -> dict[str, LayerCache]:
        """Row caches, and states in their memory: views of all memory."""
        caches: dict[str, LayerCache] = {}
        for planned in kv_cache_config.kv_cache_tensors:
            for index, name in enumerate(planned.layers):
                layer = self._layers[name]
                place = planned.offset + index * planned.layer_stride, planned.block_stride
                if isinstance(layer, RowCacheLayer):
                    caches[name] = RowCache.in_memory(memory, layer.kind, *place)
                else:
                    shapes, dtypes = layer.get_state_shape(), layer.get_state_dtype()
                    caches[name] = PackedStatePages(memory, *place, shapes, dtypes)
        return caches

    def _in_regions(
        self, memory: torch.Tensor, kv_cache_config: KVCacheConfig, kernel_block_sizes: list[int]
    ) -> tuple[dict[str, LayerCache], list[torch.Tensor]]:
        """Returns the other caches and, if blocks are contiguous, the regions of blocks."""
        caches: dict[str, LayerCache] = {}
        regions: list[torch.Tensor] = []
        in_pages = has_pages(kv_cache_config)
        of_latents = latent_sizes(self._layers[name] for name in _planned_layers(kv_cache_config))
        for planned in kv_cache_config.kv_cache_tensors:
            for index, layer_name in enumerate(planned.layers):
                region = _layer_region(memory, planned, index, kv_cache_config.num_blocks)
                spec, block_size = _spec_of(layer_name, kv_cache_config, kernel_block_sizes)
                if isinstance(spec, MambaSpec):
                    parts = state_parts(region, spec.page_size_bytes, of_latents)
                    caches[layer_name] = StatePages(parts, spec.shapes, spec.dtypes)
                else:
                    caches[layer_name] = self._cache(layer_name, region, spec, block_size, in_pages)
                regions.append(region)
        return caches, regions if in_pages else []

    def _cache(
        self,
        layer_name: str,
        region: torch.Tensor,
        spec: KVCacheSpec,
        block_size: int,
        in_pages: bool,
    ) -> LayerCache:
        layer = self._layers[layer_name]
        if isinstance(layer, BlockSparseAttention):
            assert isinstance(spec, AttentionSpec)
            return layer.cache_in(region.view(spec.dtype), block_size)
        if not isinstance(spec, MLAAttentionSpec):
            _check_paged(spec, layer_name)
            if in_pages:
                return paged_cache_in_pages(region, spec, block_size)
            return _paged_cache(region, spec, block_size)
        sizes = layer.kv_lora_rank, layer.qk_rope_head_dim, layer.index_head_size
        return MLACache.in_region(region.view(spec.dtype), block_size, *sizes)

    def zero_block_ids(self, block_ids: Sequence[int]) -> None:
        """Zeroes whole blocks of every layer's keys and values."""
        if not block_ids:
            return
        parts, slices = self._parts_by_block(), runs(block_ids)
        if len(parts) * len(slices) <= MOST_RUNS:
            for part in parts:
                for run in slices:
                    part[run].zero_()
            return
        index = async_tensor_h2d(list(block_ids), self._device, torch.int64)
        for part in parts:
            part.index_fill_(0, index, 0)

    def copy(self, copies: Sequence[tuple[int, int]], new_blocks: Sequence[int]) -> bool:
        """Copies blocks of every layer in one call. copies: pairs of source and target

        new_blocks: zeroed first; include every target
        Returns False, without writing, if no operator is available.
        """
        copy_blocks = fused_op(operators.copy_kv_blocks)
        if copy_blocks is None:
            return False
        self.zero_block_ids(new_blocks)
        copy_blocks(kv_caches=self._parts_by_block(), block_pairs=torch.tensor(copies))
        return True

    def copied(self, step: SchedulerOutput) -> SchedulerOutput:
        """Zeroes and copies a step's blocks with `copy`. Returns the step without its lists of
        these blocks, or unchanged if nothing was written."""
        copies = step.kv_cache_block_copies
        if not copies or not self.copy(copies, step.new_block_ids_to_zero or []):
            return step
        return replace(step, new_block_ids_to_zero=None, kv_cache_block_copies=None)

    def _parts_by_block(self) -> list[torch.Tensor]:
        """Every distinct part of the layers' caches, as [num_blocks, entries]."""
        parts = {part.data_ptr(): part for part in self._parts}
        return [part.view(self._num_blocks, -1) for part in parts.values()]


def runs(block_ids: Sequence[int]) -> list[slice]:
    """Returns the runs of consecutive numbers, ascending."""
    found: list[slice] = []
    for number in sorted(block_ids):
        if found and number <= found[-1].stop:
            found[-1] = slice(found[-1].start, number + 1)
        else:
            found.append(slice(number, number + 1))
    return found


def _planned_layers(kv_cache_config: KVCacheConfig) -> list[str]:
    return [name for planned in kv_cache_config.kv_cache_tensors for name in planned.layers]


def _layer_region(
    memory: torch.Tensor, planned: KVCacheTensor, index: int, num_blocks: int
) -> torch.Tensor:
    start = planned.offset + index * planned.layer_stride
    return memory[start : start + num_blocks * planned.block_stride]


def _spec_of(
    layer_name: str, kv_cache_config: KVCacheConfig, kernel_block_sizes: list[int]
) -> tuple[KVCacheSpec, int]:
    """A layer's cache specification, and the block size of its attention operator."""
    for group, kernel_block_size in zip(
        kv_cache_config.kv_cache_groups, kernel_block_sizes, strict=False
    ):
        if layer_name in group.layer_names:
            spec = group.kv_cache_spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                spec = spec.kv_cache_specs[layer_name]
            return spec, kernel_block_size
    raise AssertionError(f"{layer_name} is in no KV cache group")


def _check_paged(spec: KVCacheSpec, layer_name: str) -> None:
    if not isinstance(spec, AttentionSpec):
        raise UnsupportedFeatureError(
            f"Layer {layer_name} has a {type(spec).__name__}, and {RELEASE} supports keys and "
            "values, MLA's rows and recurrent state; choose another model."
        )
    if spec.head_size_v != spec.head_size or spec.page_size_bytes != spec.unpadded_page_size_bytes:
        raise UnsupportedFeatureError(
            f"Layer {layer_name} needs keys of {spec.head_size} and values of {spec.head_size_v} "
            f"entries in pages of {spec.page_size_bytes} bytes ({spec.unpadded_page_size_bytes} "
            f"without padding). {RELEASE} stores keys and values of one size in "
            "unpadded pages; choose another model."
        )


def _paged_cache(region: torch.Tensor, spec: AttentionSpec, block_size: int) -> PagedCache:
    shape = (-1, block_size, spec.num_kv_heads, spec.head_size)
    key, value = (half.view(spec.dtype).view(shape) for half in region.chunk(2))
    return PagedCache.of(key, value)
