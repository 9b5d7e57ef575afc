"""vLLM's runner, which decides how a step is split into ubatches: dual-batch overlap."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
import vllm.envs as envs
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed.parallel_state import get_dp_group, get_pp_group, get_tp_group
from vllm.forward_context import BatchDescriptor
from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec, KVCacheConfig
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_davinci.core import components
from vllm_davinci.core.components.protocols import Decision, Split
from vllm_davinci.core.config.options import DualBatchConfig
from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.config.side_streams import attention_scheduler
from vllm_davinci.core.log import init_logger
from vllm_davinci.core.ubatch.coordination import RankStep, coordinate_across_dp
from vllm_davinci.core.ubatch.decisions import Counts, Decisions, has_communication
from vllm_davinci.core.ubatch.metrics import CountSender
from vllm_davinci.core.ubatch.prefix_order import BlockIds, is_in_order
from vllm_davinci.core.ubatch.step import SplitStep

T = TypeVar("T")
P = TypeVar("P")
Execution = tuple[CUDAGraphMode, BatchDescriptor, bool, torch.Tensor | None, Any]

logger = init_logger(__name__)


class DecidingRunner(GPUModelRunner):
    """Decides of each step whether and how it is split into ubatches.

    vLLM itself never learns of it: it is told not to split.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        self._dbo: DualBatchConfig = get_config(vllm_config).dbo
        self._split_step: SplitStep | None = None  # of the step that is being prepared and run
        self._is_real_step = False
        self._any_dp_rank_prefills = False  # in that step, where layers want to know
        self._graph_decisions: dict[int, Decision] = {}  # by tokens of a graph
        self._splits_multimodal_steps = False  # until a model is loaded that says it
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

    def overlap_decisions(self) -> Counts:
        """Reason -> number of steps; empty when overlap is off."""
        return self._decisions.counts() if self._dbo.enabled else {}

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
        decision = self._decide(num_reqs, num_scheduled_tokens_np, execution)
        ubatch_sizes: list[torch.Tensor] | None = None
        if self.parallel_config.data_parallel_size > 1:
            execution, ubatch_sizes = self._coordinate(execution, decision, prefills)
            if ubatch_sizes is None:
                decision = self._decisions.veto(decision)
        self._decisions.tell()
        mode, descriptor = execution[:2]
        is_for_graph = mode == CUDAGraphMode.FULL or (
            # vLLM runs a size eagerly before it captures it: what the capture needs is made then.
            not self._is_real_step and bool(kwargs.get("force_uniform_decode"))
        )
        if is_for_graph:
            split = self._split_in_graph(descriptor)
            ubatch_sizes = None if split is None else self._same_on_all_dp_ranks(split, descriptor)
        else:
            split = decision.split
        self._split_step = None if split is None else SplitStep(split, ubatch_sizes)
        return execution

    def ubatches_of_graph(self, num_tokens: int) -> int:
        """As how many ubatches the graph of so many tokens is captured; 1 is whole."""
        split = self._split_in_graph(BatchDescriptor(num_tokens)) if self._dbo.enabled else None
        return 1 if split is None else len(split.ubatches)

    def _split_in_graph(self, descriptor: BatchDescriptor) -> Split | None:
        """How a graph holds its steps; None where whole. The same at capture and at each replay."""
        if descriptor.has_lora or self.supports_mm_inputs or not _is_causal(self.kv_cache_config):
            return None
        num_tokens = descriptor.num_tokens
        if num_tokens not in self._graph_decisions:
            query_len = self.uniform_decode_query_len
            decision = self._decisions.of_graph(num_tokens // query_len, query_len)
            self._graph_decisions[num_tokens] = decision
            if self._dbo.decode:
                logger.info_once(
                    "Dual-batch overlap: the graph of %d tokens holds its steps %s.",
                    num_tokens,
                    f"whole: {decision.reason.value}"
                    if decision.split is None
                    else f"as {len(decision.split.ubatches)} ubatches",
                )
        return self._graph_decisions[num_tokens].split

    def _same_on_all_dp_ranks(
        self, split: Split, descriptor: BatchDescriptor
    ) -> list[torch.Tensor] | None:
        """Per ubatch, every DP rank's tokens in a step that has one size everywhere."""
        dp_size = self.parallel_config.data_parallel_size
        if dp_size == 1:
            return None
        ends = [*split.cuts, descriptor.num_tokens]
        return [
            torch.full((dp_size,), end - begin, dtype=torch.int32)
            for begin, end in pairwise([0, *ends])
        ]

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

    def _decide(self, num_reqs: int, query_lens: np.ndarray, execution: Execution) -> Decision:
        mode, descriptor = execution[:2]
        replays = mode != CUDAGraphMode.NONE

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
            is_graph_replay=replays,
            is_split_in_graph=replays and self._split_in_graph(descriptor) is not None,
            is_supported=self._is_real_step and self._can_be_cut(),
        )

    def _can_be_cut(self) -> bool:
        """Whether nothing in this step belongs to the step as a whole."""
        batch = self.input_batch
        return bool(
            _is_causal(self.kv_cache_config)
            and not batch.lora_id_to_lora_request
            and (
                self._splits_multimodal_steps
                or not any(self.requests[name].mm_features for name in batch.req_ids)
            )
            and not self._init_model_kwargs()
        )

    def shutdown(self) -> None:
        if self._dbo.enabled:
            self._decisions.log()
        super().shutdown()

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


def _is_causal(kv_cache_config: KVCacheConfig) -> bool:
    groups = kv_cache_config.kv_cache_groups
    return bool(groups) and not any(
        isinstance(group.kv_cache_spec, EncoderOnlyAttentionSpec) for group in groups
    )


def _ubatch_sizes(decision: Decision | None, num_tokens: int) -> list[int]:
    """Rows of each ubatch, padding in the last one; [] when the step stays whole."""
    if decision is None or decision.split is None:
        return []
    return [end - begin for begin, end in pairwise([0, *decision.split.cuts, num_tokens])]
