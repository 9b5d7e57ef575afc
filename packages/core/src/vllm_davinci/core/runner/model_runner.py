"""A thin subclass of vLLM's runner that replaces the parts of a step as vLLM makes them."""

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.async_utils import AsyncOutput, AsyncPoolingOutput
from vllm.v1.worker.gpu.attn_utils import get_shared_kv_cache_layers
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager
from vllm.v1.worker.gpu.eplb_utils import EPLBController
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.pp_utils import PPHandler
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator
from vllm.v1.worker.gpu.states import RequestState
from vllm.v1.worker.utils import AttentionGroup

from vllm_davinci.core.attention.mla.layer import NPUMLAAttention
from vllm_davinci.core.attention.mla.weight_prefetch import plan_prefetches
from vllm_davinci.core.attention.spans import tell_prompt_lens
from vllm_davinci.core.checkpoint.load_errors import check_loaded, explained
from vllm_davinci.core.device import torch_cuda_names
from vllm_davinci.core.device.soc import soc_of
from vllm_davinci.core.distributed.hccl_buffers import make_communicator
from vllm_davinci.core.expert_balance.runner import NPUEPLBController, balance
from vllm_davinci.core.features.weight_transfer import refuse_new_weights
from vllm_davinci.core.graph.small_kv_cache import small_kv_cache
from vllm_davinci.core.inputs.copied_event import CopiedEvent
from vllm_davinci.core.kv_cache.memory import KVCacheMemory
from vllm_davinci.core.kv_cache.shared_pages import SLOTS_PER_KEY, address_pages, has_pages
from vllm_davinci.core.lora.adapter_manager import AdapterRunner
from vllm_davinci.core.quantization.resolve_outputs import OutputPlan, resolved_plan
from vllm_davinci.core.quantization.rotation import refuse_heads_of_rotated_models
from vllm_davinci.core.runner.adoption import adopted, converted
from vllm_davinci.core.runner.block_tables import NPUBlockTables
from vllm_davinci.core.runner.buffers import leave_out_uva
from vllm_davinci.core.runner.graphs import NPUGraphManager
from vllm_davinci.core.runner.host_drafts import HostDrafter
from vllm_davinci.core.runner.model_state import NPUModelState
from vllm_davinci.core.runner.plain_steps import NPURequestState, PlainSteps
from vllm_davinci.core.runner.prefill_context import NPUPCPManager
from vllm_davinci.core.runner.prompt_logprobs import AdaptersPromptLogprobs
from vllm_davinci.core.runner.sampler import NPURejectionSampler, NPUSampler, counts_of_plain_step
from vllm_davinci.core.runner.speculation import ComputedTokens, name_auxiliary_layers, on_npu
from vllm_davinci.core.runner.step_graphs import StepGraphs
from vllm_davinci.core.runner.ubatches import DummyLengths, StepPlans
from vllm_davinci.core.triton_kernels.registration import register_for_models
from vllm_davinci.core.ubatch.largest_steps import measure_steps
from vllm_davinci.core.ubatch.split_forward import SplitForward
from vllm_davinci.core.ubatch.splitter import StepSplitter
from vllm_davinci.core.ubatch.step_facts import BatchFacts


class NPUModelRunner(AdapterRunner, GPUModelRunner):
    """Runs one step: vLLM prepares the batch and samples, the parts here run it on the NPU.

    vLLM's runner assigns its parts to attributes; methods under `adopted` convert them there. The
    overridden methods are in the order in which vLLM's `execute_model` and `sample_tokens` call
    them.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        torch_cuda_names.install()
        leave_out_uva()
        self.computed_tokens: ComputedTokens | None = None  # None unless drafts may be rejected
        limits = soc_of(current_platform.get_device_name()).graphs
        self.graphs = StepGraphs(self, vllm_config, limits)
        super().__init__(vllm_config, device)
        layers = self.compilation_config.static_forward_context
        self._kv_cache_memory = KVCacheMemory(device, layers, [])
        query_len = self.num_speculative_steps + 1
        self.plans = StepPlans(vllm_config, query_len, self.supports_mm_inputs)
        self._dummy_lengths: DummyLengths | None = None
        self._builders_are_made: Callable[[], None] = lambda: None
        self._output_plan: OutputPlan | None = None  # None unless the model is quantized
        self._slots_of_step = np.zeros(0, dtype=np.int64)
        self._copied_output: AsyncOutput | AsyncPoolingOutput | None = None

    # --- parts, in the order in which vLLM makes them ------------------------------------------

    @adopted
    def req_states(self, states: RequestState) -> NPURequestState:
        return NPURequestState.taking_over(states)

    @adopted
    def input_buffers(self, buffers: InputBuffers) -> InputBuffers:
        self._plain_steps = PlainSteps(self.req_states, buffers)
        return buffers

    @adopted
    def pp_handler(self, handler: PPHandler) -> PPHandler:
        """vLLM's handler. Its communicator is created before the free memory is measured."""
        make_communicator("of sampled tokens", handler.broadcast_group, self.device)
        return handler

    @adopted
    def model_state(self, state: ModelState) -> NPUModelState:
        return NPUModelState.taking_over(state, self.plans)

    @adopted
    def sampler(self, sampler: Sampler) -> NPUSampler:
        return NPUSampler.taking_over(sampler)

    @adopted
    def rejection_sampler(self, sampler: RejectionSampler) -> NPURejectionSampler:
        return converted(sampler, NPURejectionSampler)

    @adopted
    def speculator(self, speculator: BaseSpeculator) -> BaseSpeculator:
        self.computed_tokens = ComputedTokens(self.req_states)
        return on_npu(speculator, self.computed_tokens)

    @adopted
    def eplb(self, controller: EPLBController) -> NPUEPLBController:
        return converted(controller, NPUEPLBController)

    @adopted
    def prompt_logprobs_worker(self, worker: PromptLogprobsWorker) -> PromptLogprobsWorker:
        if not self.lora_config:
            return worker
        return AdaptersPromptLogprobs.taking_over(worker, self.lora_manager, self.lora_state)

    @adopted
    def block_tables(self, tables: BlockTables) -> NPUBlockTables:
        return NPUBlockTables.taking_over(tables)

    @adopted
    def cudagraph_manager(self, manager: ModelCudaGraphManager) -> NPUGraphManager:
        return NPUGraphManager.taking_over(manager, self.model_state)

    @adopted
    def attn_groups(self, groups: list[list[AttentionGroup]]) -> list[list[AttentionGroup]]:
        self._builders_are_made()
        tell_prompt_lens(self.model_config, groups, self._prompt_lens)
        return groups

    @adopted
    def kv_caches(self, views: list[torch.Tensor]) -> list[torch.Tensor]:
        """The parts of all layers' caches in our layout, in the memory that vLLM has allocated."""
        memory = None
        if views:
            memory = torch.empty(0, dtype=torch.int8, device=self.device)
            memory.set_(views[0].untyped_storage())
        layers = self.compilation_config.static_forward_context
        parts: list[torch.Tensor] = []
        self._kv_cache_memory = KVCacheMemory(self.device, layers, parts)
        shared = get_shared_kv_cache_layers(self.vllm_config)
        self._kv_cache_memory.bind(memory, self.kv_cache_config, self.kernel_block_sizes, shared)
        if has_pages(self.kv_cache_config):
            groups = self.attn_groups + getattr(self.speculator, "attn_groups", [])
            limits = self.max_num_reqs, self.max_model_len
            address_pages(self.kv_cache_config, groups, *limits)
            self.block_tables.keep_slots_per_token(SLOTS_PER_KEY)
        return parts

    @property
    def pcp_manager_cls(self) -> type[NPUPCPManager]:
        return NPUPCPManager

    # --- the start: weights, KV cache ----------------------------------------------------------

    def load_model(self, load_dummy_weights: bool = False, *args: Any, **options: Any) -> None:
        quantization = self.vllm_config.quant_config
        if self.speculative_config is not None:
            refuse_heads_of_rotated_models(self.speculative_config.method, quantization)
            if self.speculative_config.method == "eagle3":
                name_auxiliary_layers(self.speculative_config.draft_model_config)
        with explained(self.model_config.model, quantization):
            super().load_model(load_dummy_weights, *args, **options)
        register_for_models()
        model = self.get_model()
        check_loaded(model, quantization, self.load_config.load_format)
        if isinstance(self.speculator, HostDrafter):
            self.speculator.load_model(model)
        balance(self)
        self.plans.take_model(model)
        self.prefetches = plan_prefetches(self.vllm_config)
        self._mla_layers = [each for each in model.modules() if isinstance(each, NPUMLAAttention)]

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's method; tensors derived from the weights are updated in the same memory."""
        refuse_new_weights(self.vllm_config)
        super().reload_weights(*args, **kwargs)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return self._kv_cache_memory.operator_specs(super().get_kv_cache_spec())

    def profile_run(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's method, after the operators' output kinds have been resolved."""
        with self.eplb.suppress():
            run = partial(self._dummy_run, skip_attn=True)  # there is no cache yet
            self._output_plan = resolved_plan(self.vllm_config, self.get_model(), run)
            super().profile_run(*args, **kwargs)
        self.graphs.measure_workspaces()

    @property
    def splitter(self) -> StepSplitter:
        return self.plans.splitter

    @property
    def split_forward(self) -> SplitForward | None:
        return self.plans.split_forward

    def measure_steps(self) -> int:
        """Most bytes that the largest steps in ubatches take; 0 if none is split."""
        if not self.splitter.splits:
            return 0
        step = small_kv_cache(self, self.max_num_tokens)
        with step as is_there, set_current_vllm_config(self.vllm_config):
            step_bytes = measure_steps(self) if is_there else 0
        self.graphs.measure_workspaces()
        return step_bytes

    @torch.inference_mode()
    def run_dummy_step(
        self, query_lens: tuple[int, ...], seq_lens: torch.Tensor, num_decodes: int
    ) -> None:
        """Runs an eager step without requests, in ubatches if it is split.

        query_lens: new tokens of each request; seq_lens: all its tokens
        """
        step = SchedulerOutput.make_empty()
        step.num_scheduled_tokens = {str(place): each for place, each in enumerate(query_lens)}
        step.total_num_scheduled_tokens = sum(query_lens)
        self._plain_steps.forget()
        self._dummy_lengths = DummyLengths(query_lens, seq_lens)
        self.kv_connector.set_disabled(True)
        received = self.intermediate_tensors
        try:
            with self.eplb.suppress():
                self.execute_model(
                    step,
                    intermediate_tensors=None if received is None else received[: sum(query_lens)],
                    dummy_run=True,
                    is_profile=True,
                )
        finally:
            self._dummy_lengths = self.execute_model_state = None
            self.kv_connector.set_disabled(False)

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any
    ) -> None:
        """vLLM's method; each ubatch gets its own builders, which keep state of their batch."""
        self.splitter.look_at_cache(kv_cache_config)
        with ExitStack() as stack:
            stack.enter_context(self.splitter.builder_per_ubatch())
            self._builders_are_made = stack.close
            super().initialize_kv_cache(kv_cache_config, *args, **kwargs)

    def maybe_dummy_run_with_lora(self, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        """vLLM's context, which removes its dummy adapters at its end. While graphs are tried, the
        adapters that the capture has added stay."""
        manager: NPUGraphManager | None = getattr(self, "cudagraph_manager", None)
        if manager is not None and manager.on_trial is not None:
            return nullcontext()
        run: AbstractContextManager[None] = super().maybe_dummy_run_with_lora(*args, **kwargs)
        return run

    def _init_minimal_kv_cache_for_profiling(self) -> None:
        cudagraph_utils._init_minimal_kv_cache_for_profiling(self)

    def _cleanup_profiling_kv_cache(self) -> None:
        cudagraph_utils._teardown_profiling_state(self)

    def _init_kv_zero_meta(self) -> None:
        """Lets our caches zero blocks: vLLM's method needs caches that are tensors."""
        self.kv_block_zeroer = self._kv_cache_memory

    @torch.inference_mode()
    def capture_model(self, **kwargs: Any) -> int:
        with self.eplb.suppress():
            if self._output_plan is not None:
                longest = self.max_model_len - 1  # a dummy prefill has one token of context
                self._output_plan.check_with_attention(self.vllm_config, longest, self._dummy_run)
            return self.graphs.capture()

    # --- a step --------------------------------------------------------------------------------

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        for layer in self._mla_layers:
            layer.follow_weights()
        self.plans.begin()
        try:
            return super().execute_model(*args, **kwargs)
        finally:
            self.plans.begin()

    def update_requests(self, scheduler_output: SchedulerOutput) -> None:
        """vLLM's method, after the step's cache blocks have been zeroed and copied."""
        super().update_requests(self._kv_cache_memory.copied(scheduler_output))

    def _dummy_run(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's method, which overwrites the buffers of a step's inputs."""
        self._plain_steps.forget()
        return super()._dummy_run(*args, **kwargs)

    def prepare_inputs(
        self,
        scheduler_output: SchedulerOutput,
        batch_req_state: Any,
        batch_desc: BatchExecutionDescriptor,
        num_active_loras: int,
    ) -> InputBatch:
        if self.computed_tokens is not None:
            self.computed_tokens.settle(batch_req_state.idx_mapping_np)
        if not self._has_plain_steps:
            return super().prepare_inputs(
                scheduler_output, batch_req_state, batch_desc, num_active_loras
            )
        has_grammars = scheduler_output.has_structured_output_requests
        return self._plain_steps.prepare(batch_req_state, batch_desc, has_grammars)

    @cached_property
    def _has_plain_steps(self) -> bool:
        """True if the host knows everything of a step except its newest tokens."""
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
        """Blocks and slots of the step, computed on the host."""
        slots, lengths = input_batch.idx_mapping_np, input_batch.num_scheduled_tokens
        self._slots_of_step = slots
        if self.pcp_manager is not None:
            self._slots_of_step = self.pcp_manager.global_batch.idx_mapping_np
            divided: tuple[tuple[torch.Tensor, ...], torch.Tensor] = self.pcp_manager.prepare_attn(
                input_batch
            )
            return divided
        if self.splitter.is_needed:
            self.plans.take_batch(self._facts_of(input_batch))
        tables = self.block_tables.gather(slots, input_batch.num_reqs_after_padding)
        starts = input_batch.query_start_loc_np[: len(slots)]
        positions = np.arange(lengths.sum()) + np.repeat(
            input_batch.num_computed_tokens_np - starts, lengths
        )
        slot_mappings = self.block_tables.slots_of(
            np.repeat(slots, lengths), positions, input_batch.num_tokens_after_padding
        )
        return tables, slot_mappings

    def _facts_of(self, batch: InputBatch) -> BatchFacts:
        features = self.encoder_cache.mm_features if self.encoder_cache is not None else {}
        model = self.get_model()
        return BatchFacts(
            can_be_cut=getattr(model, "splits_multimodal_steps", False)
            or not (
                self.model_config.is_encoder_decoder  # the encoder's output belongs to a whole step
                or any(features.get(name) for name in batch.req_ids)
            ),
            prefixes=self.block_tables.prefixes(batch.idx_mapping_np, batch.num_computed_tokens_np),
        )

    def prepare_dummy_attn(
        self, input_batch: InputBatch, *args: Any, **kwargs: Any
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        if self._dummy_lengths is not None:
            self._dummy_lengths.write(input_batch)
        prepared: tuple[tuple[torch.Tensor, ...], torch.Tensor] = super().prepare_dummy_attn(
            input_batch, *args, **kwargs
        )
        return prepared

    def _prompt_lens(self) -> Sequence[int]:
        """Tokens of the prompt of each of the step's requests."""
        lengths: Sequence[int] = self.req_states.prompt_len.np[self._slots_of_step]
        return lengths

    def sample(
        self,
        hidden_states: torch.Tensor,
        input_batch: InputBatch,
        grammar_output: GrammarOutput | None,
    ) -> tuple[SamplerOutput, torch.Tensor, torch.Tensor]:
        """vLLM's method. The output of a plain step gets its counts without a copy from the device,
        because the host knows them."""
        output, num_sampled, num_rejected = super().sample(
            hidden_states, input_batch, grammar_output
        )
        if not self._reads_tokens_on_device(input_batch.idx_mapping_np):
            num_sampled = counts_of_plain_step(input_batch)
        return output, num_sampled, num_rejected

    def postprocess_sampled(
        self, idx_mapping: torch.Tensor, sampled_tokens: torch.Tensor, *args: Any, **kwargs: Any
    ) -> None:
        """Stores a step's tokens on the device: the newest ones, and all of them if needed.

        A request still in its prompt gets a token that nothing reads: its last prompt step
        overwrites it.
        """
        if self._reads_tokens_on_device(self._slots_of_step):
            super().postprocess_sampled(idx_mapping, sampled_tokens, *args, **kwargs)
            if self.computed_tokens is not None:
                self.computed_tokens.copy()
            return
        self.req_states.last_sampled_tokens.index_copy_(0, idx_mapping, sampled_tokens)

    def _reads_tokens_on_device(self, slots: np.ndarray) -> bool:
        """True if requests, or their model, need vLLM's tables of lengths and tokens."""
        return bool(
            not self._has_plain_steps
            or self.use_pp
            or not self.model_state.is_plain
            or self.sampler.needs_logits_processing[slots].any()
            or self.sampler.trace_replay_state is not None
            or self.prompt_logprobs_worker.uses_prompt_logprobs[slots].any()
            or self.prompt_logprobs_worker.token_id_scores
        )

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        return self._held(super().sample_tokens(*args, **kwargs))

    def pool(self, *args: Any, **kwargs: Any) -> Any:
        return self._held(super().pool(*args, **kwargs))

    def _held(self, output: Any) -> Any:
        """Holds an output until the next step, which waits on the device for its copy.

        Otherwise a rank whose output is not requested would free memory that the copy still reads.
        """
        if self._copied_output is not None:
            self._copied_output.copy_event.wait()
        is_copied = isinstance(output, AsyncOutput | AsyncPoolingOutput)
        self._copied_output = output if is_copied else None
        if isinstance(output, AsyncOutput) and self.computed_tokens is not None:
            # The drafter has waited for the step's counts, so the copy of its tokens is done.
            output.copy_event = CopiedEvent()
            output.copy_event.record(self.output_copy_stream)
        return output

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """vLLM's method; only drafters on the host may have fewer drafts than were asked for."""
        taken: DraftTokenIds | None = super().take_draft_token_ids()
        if taken is not None and isinstance(self.speculator, HostDrafter):
            taken.draft_token_ids = self.speculator.newest
        return taken

    def shutdown(self) -> None:
        """vLLM's method, but collects no garbage: the engine core does, or the process ends."""
        # The worker has just unfrozen all imported objects: traversing them takes half a second,
        # and a forked worker would copy them.
        gc.freeze()
        self.graphs.destroy()
        self.splitter.log()
        super().shutdown()
