"""The places where vLLM's runner meets dual-batch overlap."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import vllm.envs as envs
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.forward_context import BatchDescriptor
from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec, KVCacheConfig
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_davinci.core import components
from vllm_davinci.core.config import DualBatchConfig, get_config
from vllm_davinci.core.log import init_logger
from vllm_davinci.core.overlap.decisions import Counts, Decisions
from vllm_davinci.core.overlap.prefix_order import BlockIds, is_in_order
from vllm_davinci.core.overlap.step import SplitStep, StepRunner
from vllm_davinci.core.stream_scheduler import Split

logger = init_logger(__name__)


class OverlapRunner(GPUModelRunner):
    """vLLM's runner, which cuts a step into micro-batches when that pays.

    vLLM itself never learns of it: it is told not to split, and what it prepares per step (slot
    mappings, attention metadata, the forward) is prepared per micro-batch by the methods here.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        self._overlap_options: DualBatchConfig = get_config(vllm_config).dbo
        self._split_step: SplitStep | None = None  # of the step that is being prepared and run
        self._is_real_step = False
        super().__init__(vllm_config, device)
        if self._overlap_options.enabled:
            scheduler = components.stream_scheduler()
            assert scheduler is not None, "the platform checks this when the engine is configured"
            is_first = get_tp_group().rank_in_group == 0 and get_pp_group().is_first_rank
            self._decisions = Decisions(
                scheduler,
                self._overlap_options,
                has_communication=self._has_communication(),
                interval_s=envs.VLLM_LOG_STATS_INTERVAL if is_first else None,
            )
            self._step_runner = StepRunner(scheduler, vllm_config)

    def _has_communication(self) -> bool:
        parallel = self.parallel_config
        return parallel.tensor_parallel_size > 1 or parallel.data_parallel_size > 1

    def overlap_decisions(self) -> Counts:
        """Reason -> number of steps; empty when overlap is off."""
        return self._decisions.counts() if self._overlap_options.enabled else {}

    # --- the decision ------------------------------------------------------------------------

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        self._is_real_step = True
        try:
            return super().execute_model(*args, **kwargs)
        finally:
            self._is_real_step = False
            self._split_step = None

    def _determine_batch_execution_and_padding(
        self,
        num_tokens: int,
        num_reqs: int,
        num_scheduled_tokens_np: np.ndarray,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[CUDAGraphMode, BatchDescriptor, bool, torch.Tensor | None, Any]:
        """Decides for the step. vLLM is always answered that the step is not split."""
        execution = super()._determine_batch_execution_and_padding(
            num_tokens, num_reqs, num_scheduled_tokens_np, *args, **kwargs
        )
        if self._overlap_options.enabled:
            self._split_step = self._decide(num_reqs, num_scheduled_tokens_np, execution[0])
            self._decisions.tell()
        return execution

    def _decide(
        self, num_reqs: int, query_lens: np.ndarray, graph_mode: CUDAGraphMode
    ) -> SplitStep | None:
        def is_ordered(split: Split) -> bool:
            return is_in_order(
                [
                    BlockIds(table.get_numpy_array(), table.block_size)
                    for table in self.input_batch.block_table.block_tables
                ],
                self.input_batch.num_computed_tokens_cpu[:num_reqs],
                query_lens,
                split.cuts,
            )

        decision = self._decisions.decide(
            query_lens.tolist(),
            is_ordered,
            decode_query_len=self.uniform_decode_query_len,
            is_real=self._is_real_step,
            is_graph_replay=graph_mode != CUDAGraphMode.NONE,
            is_supported=self._is_real_step and self._can_be_cut(),
        )
        return None if decision.split is None else SplitStep(decision.split)

    def _can_be_cut(self) -> bool:
        """Whether nothing in this step belongs to the step as a whole."""
        groups = self.kv_cache_config.kv_cache_groups
        is_causal = groups and not any(
            isinstance(group.kv_cache_spec, EncoderOnlyAttentionSpec) for group in groups
        )
        batch = self.input_batch
        return bool(
            is_causal
            and not batch.lora_id_to_lora_request
            and not any(self.requests[name].mm_features for name in batch.req_ids)
            and not self._init_model_kwargs()
        )

    # --- what is prepared per micro-batch ----------------------------------------------------

    @contextmanager
    def _builders_per_micro_batch(self) -> Iterator[None]:
        """Lets vLLM count our micro-batches as its own while it creates metadata builders."""
        before = self.parallel_config.ubatch_size
        if self._overlap_options.enabled:
            self.parallel_config.ubatch_size = self._overlap_options.num_micro_batches
        try:
            yield
        finally:
            self.parallel_config.ubatch_size = before

    def initialize_metadata_builders(
        self, kv_cache_config: KVCacheConfig, kernel_block_sizes: list[int]
    ) -> None:
        """A builder keeps state of the batch it built for, so each micro-batch has its own."""
        with self._builders_per_micro_batch():
            super().initialize_metadata_builders(kv_cache_config, kernel_block_sizes)

    def _get_slot_mappings(self, num_tokens_padded: int, *args: Any, **kwargs: Any) -> Any:
        if self._split_step is not None:
            kwargs["ubatch_slices"] = self._split_step.padded_slices(num_tokens_padded)
        return super()._get_slot_mappings(num_tokens_padded, *args, **kwargs)

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        if self._split_step is not None:
            kwargs["ubatch_slices"] = self._split_step.slices()
        return super()._build_attention_metadata(*args, **kwargs)

    def _model_forward(
        self,
        input_ids: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **model_kwargs: Any,
    ) -> Any:
        forward = super()._model_forward
        if self._split_step is None:
            return forward(
                input_ids, positions, intermediate_tensors, inputs_embeds, **model_kwargs
            )
        assert positions is not None
        return self._step_runner.run(
            self._split_step,
            forward,
            input_ids,
            positions,
            intermediate_tensors,
            inputs_embeds,
            **model_kwargs,
        )

    def shutdown(self) -> None:
        if self._overlap_options.enabled:
            self._decisions.log()
        super().shutdown()
