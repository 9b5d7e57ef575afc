"""A thin subclass of vLLM's V2 runner, which takes over the parts of a step as vLLM makes them."""

import gc
from functools import cached_property
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.attn_utils import get_shared_kv_cache_layers
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

from vllm_davinci.core.attention.mla.layer import NPUMLAAttention
from vllm_davinci.core.attention.mla.weight_prefetch import plan_prefetches
from vllm_davinci.core.checkpoint.load_errors import check_loaded, explained
from vllm_davinci.core.device import torch_cuda_names
from vllm_davinci.core.device.soc import soc_of
from vllm_davinci.core.features.weight_transfer import refuse_new_weights
from vllm_davinci.core.kv_cache.memory import KVCacheMemory
from vllm_davinci.core.quantization.resolve_outputs import OutputPlan, resolved_plan
from vllm_davinci.core.runner.adoption import adopted
from vllm_davinci.core.runner.block_tables import NPUBlockTables
from vllm_davinci.core.runner.buffers import leave_out_uva
from vllm_davinci.core.runner.graphs import NPUGraphManager, StepGraphs
from vllm_davinci.core.runner.model_state import NPUModelState
from vllm_davinci.core.runner.plain_steps import NPURequestState, PlainSteps
from vllm_davinci.core.runner.sampler import NPUSampler


class NPUModelRunner(GPUModelRunner):
    """Runs one step: vLLM prepares the batch and samples, the parts here place it on the NPU.

    vLLM's runner assigns its parts to attributes; those under `adopted` are taken over there. The
    overridden methods stand in the order in which vLLM's `execute_model` and `sample_tokens` call
    them.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        torch_cuda_names.install()
        leave_out_uva()
        limits = soc_of(current_platform.get_device_name()).graphs
        self.graphs = StepGraphs(self, vllm_config, limits)
        super().__init__(vllm_config, device)
        layers = self.compilation_config.static_forward_context
        self._kv_cache_memory = KVCacheMemory(device, layers, [])
        self._output_plan: OutputPlan | None = None  # of a quantized model

    # --- parts, in the order in which vLLM makes them ------------------------------------------

    @adopted
    def req_states(self, states: RequestState) -> NPURequestState:
        return NPURequestState.taking_over(states)

    @adopted
    def input_buffers(self, buffers: InputBuffers) -> InputBuffers:
        self._plain_steps = PlainSteps(self.req_states, buffers)
        return buffers

    @adopted
    def model_state(self, state: ModelState) -> NPUModelState:
        return NPUModelState.taking_over(state)

    @adopted
    def sampler(self, sampler: Sampler) -> NPUSampler:
        return NPUSampler.taking_over(sampler)

    @adopted
    def block_tables(self, tables: BlockTables) -> NPUBlockTables:
        return NPUBlockTables.taking_over(tables)

    @adopted
    def cudagraph_manager(self, manager: ModelCudaGraphManager) -> NPUGraphManager:
        return NPUGraphManager.taking_over(manager, self.model_state)

    @adopted
    def kv_caches(self, views: list[torch.Tensor]) -> list[torch.Tensor]:
        """The parts of all layers' caches, in our layout, in the memory that vLLM has allocated."""
        memory = None
        if views:
            memory = torch.empty(0, dtype=torch.int8, device=self.device)
            memory.set_(views[0].untyped_storage())
        layers = self.compilation_config.static_forward_context
        parts: list[torch.Tensor] = []
        self._kv_cache_memory = KVCacheMemory(self.device, layers, parts)
        shared = get_shared_kv_cache_layers(self.vllm_config)
        self._kv_cache_memory.bind(memory, self.kv_cache_config, self.kernel_block_sizes, shared)
        return parts

    # --- the start: weights, KV cache ----------------------------------------------------------

    def load_model(self, load_dummy_weights: bool = False, *args: Any, **options: Any) -> None:
        quantization = self.vllm_config.quant_config
        with explained(self.model_config.model, quantization):
            super().load_model(load_dummy_weights, *args, **options)
        model = self.get_model()
        check_loaded(model, quantization, self.load_config.load_format)
        self.prefetches = plan_prefetches(self.vllm_config)
        self._mla_layers = [each for each in model.modules() if isinstance(each, NPUMLAAttention)]

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's; what follows from the weights follows in the same memory."""
        refuse_new_weights(self.vllm_config)
        super().reload_weights(*args, **kwargs)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return self._kv_cache_memory.operator_specs(super().get_kv_cache_spec())

    def profile_run(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's, of a model whose operators have their output kinds already."""
        self._output_plan = resolved_plan(self.vllm_config, self.get_model(), self._dummy_run)
        super().profile_run(*args, **kwargs)
        self.graphs.measure_workspaces()

    def measure_steps(self) -> int:
        """Bytes that the largest steps in ubatches take: none is split."""
        return 0

    def _init_minimal_kv_cache_for_profiling(self) -> None:
        cudagraph_utils._init_minimal_kv_cache_for_profiling(self)

    def _cleanup_profiling_kv_cache(self) -> None:
        cudagraph_utils._teardown_profiling_state(self)

    def _init_kv_zero_meta(self) -> None:
        """vLLM's looks for tensors among the layers' caches, and would zero nothing of ours."""
        self.kv_block_zeroer = self._kv_cache_memory

    def capture_model(self, **kwargs: Any) -> int:
        if self._output_plan is not None:
            longest = self.max_model_len - 1  # a dummy prefill has one token of context
            self._output_plan.check_with_attention(self.vllm_config, longest, self._dummy_run)
        return self.graphs.capture_steps()

    # --- a step --------------------------------------------------------------------------------

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        for layer in self._mla_layers:
            layer.follow_weights()
        return super().execute_model(*args, **kwargs)

    def update_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Moves requests on: blocks of the cache first, which requests get copies of."""
        super().update_requests(self._kv_cache_memory.copied(scheduler_output))

    def _dummy_run(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's, which writes the buffers of a step's inputs anew."""
        self._plain_steps.forget()
        return super()._dummy_run(*args, **kwargs)

    def prepare_inputs(
        self,
        scheduler_output: SchedulerOutput,
        batch_req_state: Any,
        batch_desc: BatchExecutionDescriptor,
        num_active_loras: int,
    ) -> InputBatch:
        if not self._has_plain_steps:
            return super().prepare_inputs(
                scheduler_output, batch_req_state, batch_desc, num_active_loras
            )
        has_grammars = scheduler_output.has_structured_output_requests
        return self._plain_steps.prepare(batch_req_state, batch_desc, has_grammars)

    @cached_property
    def _has_plain_steps(self) -> bool:
        """Whether the host knows all of a step but its newest tokens."""
        return (
            self.num_speculative_steps == 0
            and self.pcp_manager is None
            and self.fast_prefill is None
            and self.model_config.rswa_window is None
            and self.model_state.num_new_sampled_tokens_per_step == 1
        )

    def prepare_attn(
        self, input_batch: InputBatch
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Blocks and slots of the step, from what the host knows of it."""
        slots, lengths = input_batch.idx_mapping_np, input_batch.num_scheduled_tokens
        self._slots_of_step = slots
        tables = self.block_tables.gather(slots, input_batch.num_reqs_after_padding)
        starts = input_batch.query_start_loc_np[: len(slots)]
        positions = np.arange(lengths.sum()) + np.repeat(
            input_batch.num_computed_tokens_np - starts, lengths
        )
        slot_mappings = self.block_tables.slots_of(
            np.repeat(slots, lengths), positions, input_batch.num_tokens_after_padding
        )
        return tables, slot_mappings

    def postprocess_sampled(
        self, idx_mapping: torch.Tensor, sampled_tokens: torch.Tensor, *args: Any, **kwargs: Any
    ) -> None:
        """Keeps a step's tokens on the device: the newest ones, and all of them where needed.

        A request that is a prompt still gets a token that nothing reads: its last step writes
        another one.
        """
        if self._reads_tokens_on_device(self._slots_of_step):
            super().postprocess_sampled(idx_mapping, sampled_tokens, *args, **kwargs)
            return
        self.req_states.last_sampled_tokens.index_copy_(0, idx_mapping, sampled_tokens)

    def _reads_tokens_on_device(self, slots: np.ndarray) -> bool:
        """Whether requests want vLLM's tables of lengths and tokens, or their model does."""
        return bool(
            not self._has_plain_steps
            or self.use_pp
            or not self.model_state.is_plain
            or self.sampler.needs_logits_processing[slots].any()
            or self.prompt_logprobs_worker.uses_prompt_logprobs[slots].any()
            or self.prompt_logprobs_worker.token_id_scores
        )

    def shutdown(self) -> None:
        """vLLM's, without its search for garbage: the engine core does one, or the process ends."""
        # The worker has just unfrozen all that was imported, which takes half a second to walk
        # through; a forked worker would copy it, too.
        gc.freeze()
        self.graphs.destroy()
        super().shutdown()
