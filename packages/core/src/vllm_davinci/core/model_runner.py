"""A thin subclass of vLLM's V1 runner: loading, slot mapping and synchronization."""

import gc
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch_npu
from safetensors import SafetensorError
from vllm.config import VllmConfig
from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput

from vllm_davinci.core.attention.block_table import HostBatch, NPUMultiGroupBlockTable
from vllm_davinci.core.attention.mla.weight_prefetch import plan_prefetches
from vllm_davinci.core.checkpoint.load_errors import (
    describe_damage,
    describe_failure,
    require_norm_biases,
)
from vllm_davinci.core.device import torch_cuda_names
from vllm_davinci.core.errors import CheckpointError, CoreError
from vllm_davinci.core.fused_moe.communication import CommunicationMethod
from vllm_davinci.core.fused_moe.method import NPUFusedMoEMethodBase
from vllm_davinci.core.graph.plan import LayerCounts
from vllm_davinci.core.graph.runner import GraphRunner
from vllm_davinci.core.kv_cache.runner import KVCacheRunner
from vllm_davinci.core.multimodal.runner import MultimodalRunner
from vllm_davinci.core.quantization.config import (
    LOAD_FORMATS_WITHOUT_LOADERS,
    AscendQuantizationConfig,
)
from vllm_davinci.core.quantization.resolve_outputs import resolve_outputs
from vllm_davinci.core.sampling.runner import SamplingRunner
from vllm_davinci.core.ubatch.runner import UBatchRunner


class NPUModelRunner(GraphRunner, UBatchRunner, KVCacheRunner, MultimodalRunner, SamplingRunner):
    """Runs one step: vLLM prepares the batch and samples, this class places it on the NPU."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        torch_cuda_names.install()
        super().__init__(vllm_config, device)
        if self.parallel_config.pipeline_parallel_size > 1 and not self.use_async_scheduling:
            # A stage that hands its output on waits for no device. Without this, the host fills
            # the next step's inputs into memory that the copies of this one still read.
            self.prepare_inputs_event = torch_npu.npu.Event()
        self._output_being_copied: AsyncGPUModelRunnerOutput | None = None
        self._has_failed = False  # the newest step, and there is nothing to sample
        self._is_settled = True  # nothing is left on the device of a step that raised
        self._take_over_block_tables()

    def load_model(self, load_dummy_weights: bool = False, **options: Any) -> None:
        quantization = self.vllm_config.quant_config
        try:
            super().load_model(load_dummy_weights, **options)
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
        plan_prefetches(self.vllm_config)

    def profile_run(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's, of a model whose operators have their output kinds already."""
        if isinstance(self.vllm_config.quant_config, AscendQuantizationConfig):
            resolve_outputs(
                self.get_model(),
                lambda: self._dummy_run(1, skip_eplb=True, is_profile=True),
            )
        super().profile_run(*args, **kwargs)

    def shutdown(self) -> None:
        """vLLM's, without its search for garbage: the engine core does one, or the process ends."""
        # The worker has just unfrozen all that was imported, which takes half a second to walk
        # through; a forked worker would copy it, too.
        gc.freeze()
        super().shutdown()

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

    def may_reinitialize_input_batch(self, *args: Any, **kwargs: Any) -> None:
        super().may_reinitialize_input_batch(*args, **kwargs)
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
