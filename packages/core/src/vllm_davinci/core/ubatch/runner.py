"""vLLM's runner, which runs steps as ubatches: dual-batch overlap."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import vllm.envs as envs
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed.parallel_state import get_dp_group, get_pp_group, get_tp_group
from vllm.forward_context import BatchDescriptor
from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec, KVCacheConfig
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_davinci.core import components
from vllm_davinci.core.attention.mla.metadata import NPUMLAMetadata
from vllm_davinci.core.components.protocols import Decision, Split
from vllm_davinci.core.config.options import DualBatchConfig
from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.config.side_streams import attention_scheduler
from vllm_davinci.core.log import init_logger
from vllm_davinci.core.ubatch.coordination import RankStep, coordinate_across_dp
from vllm_davinci.core.ubatch.decisions import Counts, Decisions, has_communication
from vllm_davinci.core.ubatch.metrics import CountSender
from vllm_davinci.core.ubatch.prefix_order import BlockIds, is_in_order
from vllm_davinci.core.ubatch.step import SplitStep, StepRunner

Execution = tuple[CUDAGraphMode, BatchDescriptor, bool, torch.Tensor | None, Any]

logger = init_logger(__name__)


class UBatchRunner(GPUModelRunner):
    """vLLM's runner, which splits a step into ubatches when that pays.

    vLLM itself never learns of it: it is told not to split, and what it prepares per step (slot
    mappings, attention metadata, the forward) is prepared per ubatch by the methods here.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        self._dbo: DualBatchConfig = get_config(vllm_config).dbo
        self._split_step: SplitStep | None = None  # of the step that is being prepared and run
        self._is_real_step = False
        self._any_dp_rank_prefills = False  # in that step, where layers want to know
        super().__init__(vllm_config, device)
        self._layers_need_dp_prefills = (
            self.parallel_config.data_parallel_size > 1
            and attention_scheduler(vllm_config) is not None
        )
        if self._dbo.enabled:
            scheduler = components.stream_scheduler()
            assert scheduler is not None, "the platform checks this when the engine is configured"
            is_first = get_tp_group().rank_in_group == 0 and get_pp_group().is_first_rank
            self._decisions = Decisions(
                scheduler,
                self._dbo,
                has_communication(self.parallel_config),
                interval_s=envs.VLLM_LOG_STATS_INTERVAL if is_first else None,
                publish=CountSender(vllm_config) if is_first else None,
            )
            self._step_runner = StepRunner(scheduler, vllm_config)

    def overlap_decisions(self) -> Counts:
        """Reason -> number of steps; empty when overlap is off."""
        return self._decisions.counts() if self._dbo.enabled else {}

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
    ) -> Execution:
        """Decides for the step. vLLM is always answered that the step is not split."""
        if not self._dbo.enabled and not self._layers_need_dp_prefills:
            return super()._determine_batch_execution_and_padding(
                num_tokens, num_reqs, num_scheduled_tokens_np, *args, **kwargs
            )
        prefills = (
            self._is_real_step and num_scheduled_tokens_np.max() > self.uniform_decode_query_len
        )
        with self._as_one_dp_rank():
            execution: Execution = super()._determine_batch_execution_and_padding(
                num_tokens, num_reqs, num_scheduled_tokens_np, *args, **kwargs
            )
        if not self._dbo.enabled:
            return self._coordinate(execution, None, prefills)[0]
        decision = self._decide(num_reqs, num_scheduled_tokens_np, execution[0])
        ubatch_sizes: list[torch.Tensor] | None = None
        if self.parallel_config.data_parallel_size > 1:
            execution, ubatch_sizes = self._coordinate(execution, decision, prefills)
            if ubatch_sizes is None:
                decision = self._decisions.veto(decision)
        self._decisions.tell()
        self._split_step = (
            None if decision.split is None else SplitStep(decision.split, ubatch_sizes)
        )
        return execution

    def _coordinate(
        self, execution: Execution, decision: Decision | None, prefills: bool
    ) -> tuple[Execution, list[torch.Tensor] | None]:
        """The execution that all DP ranks run, and per ubatch every DP rank's tokens."""
        mode, descriptor, _, _, statistics = execution
        coordinated = coordinate_across_dp(
            RankStep(
                descriptor.num_tokens,
                mode.value,
                _ubatch_sizes(decision, descriptor.num_tokens),
                bool(prefills),
            ),
            self._dbo.num_ubatches,
            self.parallel_config.data_parallel_rank,
            get_dp_group().cpu_group,
        )
        self._any_dp_rank_prefills = coordinated.prefills
        num_tokens = coordinated.num_tokens
        if mode != CUDAGraphMode.NONE:
            if coordinated.graph_mode is None:  # one DP rank cannot replay: none does
                mode = CUDAGraphMode.NONE
                descriptor = BatchDescriptor(descriptor.num_tokens)
            else:  # a graph has one size everywhere
                num_tokens = num_tokens.max().expand_as(num_tokens).clone()
                mode, descriptor = self.cudagraph_dispatcher.dispatch(
                    num_tokens=int(num_tokens[0]),
                    uniform_decode=descriptor.uniform,
                    has_lora=descriptor.has_lora,
                    num_active_loras=descriptor.num_active_loras,
                    valid_modes={mode},
                )
        return (mode, descriptor, False, num_tokens, statistics), coordinated.ubatch_sizes

    def _decide(self, num_reqs: int, query_lens: np.ndarray, graph_mode: CUDAGraphMode) -> Decision:
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

        return self._decisions.decide(
            query_lens.tolist(),
            is_ordered,
            decode_query_len=self.uniform_decode_query_len,
            is_real=self._is_real_step,
            is_graph_replay=graph_mode != CUDAGraphMode.NONE,
            is_supported=self._is_real_step and self._can_be_cut(),
        )

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

    # --- what is prepared per ubatch ----------------------------------------------------

    @contextmanager
    def _parallel_setting(self, name: str, value: int) -> Iterator[None]:
        """Another value of this process's own parallel configuration, for one call of vLLM's."""
        before = getattr(self.parallel_config, name)
        setattr(self.parallel_config, name, value)
        try:
            yield
        finally:
            setattr(self.parallel_config, name, before)

    def _as_one_dp_rank(self) -> AbstractContextManager[None]:
        """vLLM does not exchange with other DP ranks: `_coordinate` does, with the split in it."""
        return self._parallel_setting("data_parallel_size", 1)

    def initialize_metadata_builders(
        self, kv_cache_config: KVCacheConfig, kernel_block_sizes: list[int]
    ) -> None:
        """A builder keeps state of the batch it built for, so each ubatch has its own."""
        if not self._dbo.enabled:
            return super().initialize_metadata_builders(kv_cache_config, kernel_block_sizes)
        with self._parallel_setting("ubatch_size", self._dbo.num_ubatches):
            super().initialize_metadata_builders(kv_cache_config, kernel_block_sizes)

    def _get_slot_mappings(self, num_tokens_padded: int, *args: Any, **kwargs: Any) -> Any:
        if self._split_step is not None:
            kwargs["ubatch_slices"] = self._split_step.padded_slices(num_tokens_padded)
        return super()._get_slot_mappings(num_tokens_padded, *args, **kwargs)

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        if self._split_step is not None:
            kwargs["ubatch_slices"] = self._split_step.slices()
        built = super()._build_attention_metadata(*args, **kwargs)
        if self._layers_need_dp_prefills and self._any_dp_rank_prefills:
            by_layer = built[0] if isinstance(built[0], list) else [built[0]]
            for metadata in (each for part in by_layer for each in part.values()):
                if isinstance(metadata, NPUMLAMetadata):
                    metadata.others_prefill = True
        return built

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

    def load_model(self, load_dummy_weights: bool = False) -> None:
        super().load_model(load_dummy_weights)
        if self._dbo.enabled:
            self._step_runner.prepare(self.get_model())

    def shutdown(self) -> None:
        if self._dbo.enabled:
            self._decisions.log()
        super().shutdown()


def _ubatch_sizes(decision: Decision | None, num_tokens: int) -> list[int]:
    """Rows of each ubatch, padding in the last one; [] when the step stays whole."""
    if decision is None or decision.split is None:
        return []
    return [end - begin for begin, end in pairwise([0, *decision.split.cuts, num_tokens])]
