"""A thin subclass of vLLM's V1 runner: cache layout, slot mapping and synchronization."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch_npu
from safetensors import SafetensorError
from vllm.config import VllmConfig
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
from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput

from vllm_davinci.core.attention.block_table import HostBatch, NPUMultiGroupBlockTable
from vllm_davinci.core.attention.mla.cache import MLACache
from vllm_davinci.core.attention.paged import PagedCache
from vllm_davinci.core.checkpoint.load_errors import (
    describe_damage,
    describe_failure,
    require_norm_biases,
)
from vllm_davinci.core.components.fused_ops import fused_op
from vllm_davinci.core.device import torch_cuda_names
from vllm_davinci.core.errors import RELEASE, CheckpointError, CoreError, UnsupportedFeatureError
from vllm_davinci.core.fused_moe.communication import CommunicationMethod
from vllm_davinci.core.fused_moe.method import NPUFusedMoEMethodBase
from vllm_davinci.core.graph.plan import LayerCounts
from vllm_davinci.core.graph.runner import GraphRunner
from vllm_davinci.core.multimodal.runner import MultimodalRunner
from vllm_davinci.core.platform import NPUPlatform
from vllm_davinci.core.quantization.config import (
    LOAD_FORMATS_WITHOUT_LOADERS,
    AscendQuantizationConfig,
)
from vllm_davinci.core.quantization.resolve_outputs import resolve_outputs
from vllm_davinci.core.sampling.runner import SamplingRunner
from vllm_davinci.core.ubatch.runner import UBatchRunner


class NPUModelRunner(GraphRunner, UBatchRunner, MultimodalRunner, SamplingRunner):
    """Runs one step: vLLM prepares the batch and samples, this class places it on the NPU."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        torch_cuda_names.install()
        super().__init__(vllm_config, device)
        self.cascade_attn_enabled = False
        if self.parallel_config.pipeline_parallel_size > 1 and not self.use_async_scheduling:
            # A stage that hands its output on waits for no device. Without this, the host fills
            # the next step's inputs into memory that the copies of this one still read.
            self.prepare_inputs_event = torch_npu.npu.Event()
        self._output_being_copied: AsyncGPUModelRunnerOutput | None = None
        self._has_failed = False  # the newest step, and there is nothing to sample
        self._is_settled = True  # nothing is left on the device of a step that raised
        self._take_over_block_tables()

    def _init_device_properties(self) -> None:
        self.num_sms = NPUPlatform.num_compute_units(self.device.index or 0)

    def load_model(self, load_dummy_weights: bool = False) -> None:
        quantization = self.vllm_config.quant_config
        try:
            super().load_model(load_dummy_weights=load_dummy_weights)
        except SafetensorError as error:
            raise CheckpointError(describe_damage(self.model_config.model, error)) from error
        except (KeyError, ValueError) as error:
            if isinstance(error, CoreError) or not isinstance(
                quantization, AscendQuantizationConfig
            ):
                raise
            told = describe_failure(self.model_config.model, quantization.description, error)
            if told is None:
                raise
            raise CheckpointError(told) from error
        if isinstance(quantization, AscendQuantizationConfig):
            quantization.log_missing()
            if self.load_config.load_format not in LOAD_FORMATS_WITHOUT_LOADERS:
                require_norm_biases(self.get_model(), quantization.description)

    def profile_run(self) -> None:
        """vLLM's, of a model whose operators have their output kinds already."""
        if isinstance(self.vllm_config.quant_config, AscendQuantizationConfig):
            resolve_outputs(
                self.get_model(),
                lambda: self._dummy_run(1, skip_eplb=True, is_profile=True),
            )
        super().profile_run()

    def _forward_of_graph(self, **inputs: Any) -> Any:
        return self.forward_as_ubatches(self.get_model(), **inputs)

    def _layer_counts(self) -> LayerCounts:
        methods = (getattr(module, "quant_method", None) for module in self.get_model().modules())
        forwards = [
            method.moe_forward
            for method in methods
            if isinstance(method, NPUFusedMoEMethodBase) and method.moe_forward is not None
        ]
        are_fused = [
            forward.dispatchers.rule.choose(1).method is CommunicationMethod.FUSED
            for forward in forwards
            if forward.dispatchers is not None
        ]
        return replace(
            super()._layer_counts(),
            experts=len(forwards),
            exchanging=are_fused.count(False),
            fused=are_fused.count(True),
            apart=sum(
                forward.shared is not None and forward.shared.reduces_apart for forward in forwards
            ),
        )

    def _ubatches(self, sizes: Iterable[int]) -> dict[int, int]:
        return {size: count for size in sizes if (count := self.ubatches_of_graph(size)) > 1}

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_settled:
            # A whole step ends with a wait for its tokens. One that raised has not come to it, and
            # its copies may still read the memory that this step's inputs are written into.
            torch_npu.npu.synchronize(self.device)
        self._has_failed, self._is_settled = True, False
        output = super().execute_model(*args, **kwargs)
        self._has_failed, self._is_settled = False, True
        return output

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Samples, and keeps an asynchronous output until the next step.

        A rank whose output nobody asks for drops it at once, and with it device memory that the
        copy to the host still reads. After a step that raised there is nothing to sample: None
        makes vLLM's engine raise that step's error, where an empty output would hide it.
        """
        if self._has_failed:
            self._has_failed = False
            return None
        output = super().sample_tokens(*args, **kwargs)
        if self._output_being_copied is not None:
            # Not Stream.wait_event: torch's own stream takes no torch_npu event.
            self._output_being_copied.async_copy_ready_event.wait()
        is_asynchronous = isinstance(output, AsyncGPUModelRunnerOutput)
        self._output_being_copied = output if is_asynchronous else None
        return output

    # --- slot mapping ----------------------------------------------------------------------

    def may_reinitialize_input_batch(
        self, kv_cache_config: KVCacheConfig, kernel_block_sizes: list[int]
    ) -> None:
        super().may_reinitialize_input_batch(kv_cache_config, kernel_block_sizes)
        self._take_over_block_tables()

    def _take_over_block_tables(self) -> None:
        """Makes our input batch map tokens to cache slots on the host."""
        self.input_batch.block_table = NPUMultiGroupBlockTable.taking_over(
            self.input_batch.block_table, self._host_batch
        )

    def _host_batch(self, num_tokens: int) -> HostBatch:
        """The step's request index and position per token, as vLLM computed them on the host."""
        req_indices = self.req_indices.np[:num_tokens]
        computed = self.input_batch.num_computed_tokens_cpu
        positions: np.ndarray = computed[req_indices] + self.query_pos.np[:num_tokens]
        return HostBatch(req_indices, positions)

    # --- KV cache --------------------------------------------------------------------------

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
