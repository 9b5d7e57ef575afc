"""The steps of vLLM's runner that ubatches are part of."""

from typing import Any

import numpy as np
from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_davinci.core import components
from vllm_davinci.core.checkpoint.runner import LoadingRunner
from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.ubatch.planned_step import WHOLE
from vllm_davinci.core.ubatch.split_forward import SplitForward
from vllm_davinci.core.ubatch.splitter import Execution, StepSplitter
from vllm_davinci.core.ubatch.step_facts import BatchFacts, ScheduledStep


class SplittingRunner(LoadingRunner):
    """vLLM's runner, which plans how a step is split, and runs its forward as planned."""

    splitter: StepSplitter
    split_forward: SplitForward | None
    _is_real_step = False
    _planned = WHOLE  # how the step is run that is being prepared

    def _take_ubatches(self) -> None:
        """Prepares the split of steps. Comes before the graphs, which are captured per split."""
        dbo = get_config(self.vllm_config).dbo
        scheduler = components.stream_scheduler() if dbo.enabled else None
        self.splitter = StepSplitter(
            self.vllm_config,
            scheduler,
            self.cudagraph_dispatcher,
            self.uniform_decode_query_len,
            self.supports_mm_inputs,
        )
        self.split_forward = (
            None
            if scheduler is None
            else SplitForward(scheduler, self.vllm_config, dbo.norm_vector_cores)
        )

    def load_model(self, load_dummy_weights: bool = False, **options: Any) -> None:
        super().load_model(load_dummy_weights, **options)
        if self.split_forward is not None:
            self.split_forward.prepare(self.get_model())

    def initialize_metadata_builders(
        self, kv_cache_config: KVCacheConfig, kernel_block_sizes: list[int]
    ) -> None:
        """A builder keeps state of the batch it built for, so each ubatch has its own."""
        self.splitter.look_at_cache(kv_cache_config)
        with self.splitter.builder_per_ubatch():
            super().initialize_metadata_builders(kv_cache_config, kernel_block_sizes)

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        self._is_real_step = True
        try:
            return super().execute_model(*args, **kwargs)
        finally:
            self._is_real_step, self._planned = False, WHOLE

    def _determine_batch_execution_and_padding(
        self,
        num_tokens: int,
        num_reqs: int,
        num_scheduled_tokens_np: np.ndarray,
        *args: Any,
        **kwargs: Any,
    ) -> Execution:
        """Plans the step. vLLM is always answered that it is not split."""
        determine = super()._determine_batch_execution_and_padding
        if not self.splitter.is_needed:
            return determine(num_tokens, num_reqs, num_scheduled_tokens_np, *args, **kwargs)
        with self.splitter.one_dp_rank():
            alone = determine(num_tokens, num_reqs, num_scheduled_tokens_np, *args, **kwargs)
        is_real = self._is_real_step
        precedes_graph = not is_real and bool(kwargs.get("force_uniform_decode"))
        step = ScheduledStep(num_scheduled_tokens_np, is_real, precedes_graph)
        facts = None
        if is_real:
            facts = BatchFacts.of(
                self.input_batch, self.requests, self.get_model(), self._init_model_kwargs()
            )
        execution, self._planned = self.splitter.plan(step, alone, facts)
        return execution

    def _get_slot_mappings(self, num_tokens_padded: int, *args: Any, **kwargs: Any) -> Any:
        by_group, by_layer = super()._get_slot_mappings(num_tokens_padded, *args, **kwargs)
        return by_group, self._planned.slots(by_layer, num_tokens_padded)

    def _build_attention_metadata(
        self, num_tokens: int, num_reqs: int, max_query_len: int, *args: Any, **kwargs: Any
    ) -> Any:
        decodes = max_query_len <= self.uniform_decode_query_len
        kwargs |= self._planned.metadata_options(decodes)
        built, *others = super()._build_attention_metadata(
            num_tokens, num_reqs, max_query_len, *args, **kwargs
        )
        return self._planned.metadata(built, decodes), *others

    def _forward_as_planned(self, *args: Any, **inputs: Any) -> Any:
        """The model's output for the step: of all of it at once, or of its ubatches in turn."""
        model = self.get_model()
        if self._planned.split is None or self.split_forward is None:
            return model(*args, **inputs)
        return self.split_forward.run(self._planned.split, model, *args, **inputs)
