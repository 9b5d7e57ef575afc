"""A thin subclass of vLLM's V1 runner that calls the parts of a step in order."""

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch_npu
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.distributed.parallel_state import get_pp_group
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import SamplerOutput

from vllm_davinci.core import components
from vllm_davinci.core.attention.block_table import map_slots_on_host
from vllm_davinci.core.attention.mla.layer import NPUMLAAttention
from vllm_davinci.core.attention.mla.weight_prefetch import plan_prefetches
from vllm_davinci.core.attention.spans import tell_prompt_lens
from vllm_davinci.core.checkpoint.load_errors import check_loaded, explained
from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.device import torch_cuda_names
from vllm_davinci.core.device.soc import soc_of
from vllm_davinci.core.expert_balance.runner import BalancingRunner
from vllm_davinci.core.features.weight_transfer import refuse_new_weights
from vllm_davinci.core.fused_moe.layer_counts import layer_counts
from vllm_davinci.core.graph.capture import GraphCapture
from vllm_davinci.core.graph.drafter import CapturedDrafter
from vllm_davinci.core.graph.small_kv_cache import small_kv_cache
from vllm_davinci.core.graph.wrapper import NPUGraphWrapper
from vllm_davinci.core.inputs.copied_event import CopiedEvent
from vllm_davinci.core.inputs.steady_decode import SteadyDecode
from vllm_davinci.core.kv_cache.memory import KVCacheMemory, first_part
from vllm_davinci.core.kv_cache.shared_pages import SLOTS_PER_KEY, address_pages, has_pages
from vllm_davinci.core.lora.prompt_logprobs import prompt_logprobs
from vllm_davinci.core.lora.runner import AdapterRunner
from vllm_davinci.core.multimodal.encoder_places import EncoderPlaces, in_order_of_batch
from vllm_davinci.core.multimodal.host_values import host_values
from vllm_davinci.core.quantization.resolve_outputs import OutputPlan, resolved_plan
from vllm_davinci.core.quantization.rotation import refuse_heads_of_rotated_models
from vllm_davinci.core.sampling.bookkeeping import gets_one_token_each, record
from vllm_davinci.core.sampling.newest_tokens import TokenHistory
from vllm_davinci.core.sampling.output_copy import OutputCopy
from vllm_davinci.core.sampling.sampler import NPUSampler
from vllm_davinci.core.spec_decode.drafters import with_own_drafter
from vllm_davinci.core.ubatch.largest_steps import measure_steps
from vllm_davinci.core.ubatch.planned_step import WHOLE
from vllm_davinci.core.ubatch.split_forward import SplitForward
from vllm_davinci.core.ubatch.splitter import Execution, StepSplitter
from vllm_davinci.core.ubatch.step_facts import BatchFacts, ScheduledStep


class NPUModelRunner(AdapterRunner, BalancingRunner):
    """Runs one step: vLLM prepares the batch and samples, the parts here run it on the NPU.

    vLLM's `execute_model` and `sample_tokens` call the overridden methods in the order of this
    file. Parts do not know each other; data between them passes through here.
    """

    # vLLM creates them again under these names.
    model: Any
    num_prompt_logprobs: dict[str, int]
    prepare_inputs_event: torch.Event | None

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        torch_cuda_names.install()
        super().__init__(with_own_drafter(vllm_config), device)
        splits = get_config(vllm_config).dbo.enabled
        scheduler = components.stream_scheduler() if splits else None
        self._steady_decode = SteadyDecode(
            self, self._make_buffer(self.max_num_reqs, dtype=torch.int64), self.use_async_scheduling
        )
        self.splitter = StepSplitter(
            vllm_config,
            scheduler,
            self.cudagraph_dispatcher,
            self.uniform_decode_query_len,
            self.supports_mm_inputs,
        )
        self.split_forward = None if scheduler is None else SplitForward(scheduler, vllm_config)
        self._kv_cache_memory = KVCacheMemory(
            device, self.compilation_config.static_forward_context, self.kv_caches
        )
        self.graphs = GraphCapture(self, soc_of(current_platform.get_device_name()).graphs)
        self.sampler = NPUSampler(self.sampler.logprobs_mode, self.sampler.use_fp64_gumbel)
        self._take_drafter()
        self._token_history = TokenHistory()

        self._has_plain_inputs = not (
            self.uses_mrope
            or self.enable_prompt_embeds
            or self.speculative_config is not None
            or self.cache_config.kv_sharing_fast_prefill  # needs indices of the sampled rows
        )
        if self.use_async_scheduling or self.parallel_config.pipeline_parallel_size > 1:
            # A pipeline stage that passes its output on does not wait for its device either.
            # Without this, the host would fill the next step's inputs into memory that this step's
            # copies still read.
            self.prepare_inputs_event = CopiedEvent()
        self._map_slots()

        self._is_real_step = False
        self._planned = WHOLE  # the execution plan of the step being prepared
        self._output_copy = OutputCopy()
        self._has_failed = False  # the newest step, with nothing to sample
        self._output_plan: OutputPlan | None = None  # of a quantized model
        self._is_settled = True  # nothing of a failed step is left on the device

    # --- the start: weights, KV cache, graphs ------------------------------------------------

    def load_model(self, load_dummy_weights: bool = False, **options: Any) -> None:
        quantization = self.vllm_config.quant_config
        if self.speculative_config is not None:
            refuse_heads_of_rotated_models(self.speculative_config.method, quantization)
        with explained(self.model_config.model, quantization):
            super().load_model(load_dummy_weights, **options)
        model = self.get_model()
        check_loaded(model, quantization, self.load_config.load_format)
        self.prefetches = plan_prefetches(self.vllm_config)
        self._mla_layers = [each for each in model.modules() if isinstance(each, NPUMLAAttention)]
        self._encoder_places = EncoderPlaces(model, self.device)
        self._host_values = host_values(model, self.device)
        if self.split_forward is not None:
            self.split_forward.prepare(model)
        if isinstance(self.model, CUDAGraphWrapper):  # vLLM's own method uses torch.cuda's graphs
            self.model = self.graphs.wrap(model, self._forward_as_planned)

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's method; tensors derived from the weights are updated in the same memory."""
        refuse_new_weights(self.vllm_config)
        super().reload_weights(*args, **kwargs)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return self._kv_cache_memory.operator_specs(super().get_kv_cache_spec())

    def profile_run(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's method, after the operators' output kinds have been resolved."""
        self._output_plan = resolved_plan(self.vllm_config, self.get_model(), self._dummy_run)
        super().profile_run(*args, **kwargs)
        self.graphs.measure_workspaces()

    def measure_steps(self) -> int:
        """Most bytes that the largest steps in ubatches take; 0 if none is split."""
        if not self.splitter.splits:
            return 0
        step = small_kv_cache(self, self.max_num_tokens)
        with step as is_there, set_current_vllm_config(self.vllm_config):
            step_bytes = measure_steps(self) if is_there else 0
        self.graphs.measure_workspaces()
        return step_bytes

    def initialize_metadata_builders(
        self, kv_cache_config: KVCacheConfig, kernel_block_sizes: list[int]
    ) -> None:
        """Gives each ubatch its own builders, which keep state of the batch they built for."""
        self.splitter.look_at_cache(kv_cache_config)
        with self.splitter.builder_per_ubatch():
            super().initialize_metadata_builders(kv_cache_config, kernel_block_sizes)
        address_pages(kv_cache_config, self._groups(), self.max_num_reqs, self.max_model_len)
        tell_prompt_lens(
            self.model_config, self.attn_groups, lambda: self.input_batch.num_prompt_tokens
        )

    def may_reinitialize_input_batch(self, kv_cache_config: KVCacheConfig) -> None:
        super().may_reinitialize_input_batch(kv_cache_config)
        self._map_slots(SLOTS_PER_KEY if has_pages(kv_cache_config) else 1)

    def _map_slots(self, slots_per_token: int = 1) -> None:
        tokens = (self.req_indices, self.query_pos, self._rejected.counts)
        map_slots_on_host(self.input_batch, *tokens, slots_per_token)

    def initialize_kv_cache_tensors(
        self,
        kv_cache_config: KVCacheConfig,
        kernel_block_sizes: list[int],
        kv_cache_allocation_context: AbstractContextManager[None] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Allocates the cache in our layout. Returns its first part per layer."""
        caches = self._kv_cache_memory.allocate(
            kv_cache_config,
            kernel_block_sizes,
            self.shared_kv_cache_layers,
            kv_cache_allocation_context,
        )
        return {name: first_part(cache) for name, cache in caches.items()}

    def _init_kv_zero_meta(self) -> None:
        """Does nothing: `_zero_block_ids` indexes the caches directly."""

    def capture_model(self) -> int:
        if self._output_plan is not None:
            longest = self.max_model_len - 1  # a dummy prefill has one token of context
            self._output_plan.check_with_attention(self.vllm_config, longest, self._dummy_run)
        layers = layer_counts(self.get_model(), self.kv_cache_config, get_pp_group().is_first_rank)
        asked = self._drafter_to_capture()
        drafter = None if asked is None else CapturedDrafter(asked, self.vllm_config)
        return self.graphs.capture(layers, self.splitter.ubatches_of_graph, drafter)

    # --- a step: its batch and inputs --------------------------------------------------------

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_settled:
            # A whole step ends with a wait for its tokens. A failed step did not reach it, and its
            # copies may still read the memory into which this step's inputs are written.
            torch_npu.npu.synchronize(self.device)
        for layer in self._mla_layers:
            layer.follow_weights()
        self._has_failed, self._is_settled, self._is_real_step = True, False, True
        try:
            output = super().execute_model(*args, **kwargs)
        finally:
            self._is_real_step, self._planned = False, WHOLE
        self._has_failed, self._is_settled = False, True
        return output

    def _update_states(self, scheduler_output: SchedulerOutput) -> Callable[..., Any] | None:
        """Updates the batch: first the cache blocks, of which requests get copies."""
        scheduler_output = self._kv_cache_memory.copied(scheduler_output)
        if not (
            self._has_plain_inputs
            and self._steady_decode.only_moves_on(self.input_batch, scheduler_output)
            and get_pp_group().is_last_rank
            and not has_kv_transfer_group()
        ):
            return super()._update_states(scheduler_output)
        self._process_encoder_cache_scheduler_output(scheduler_output)
        self._steady_decode.move_on(self.input_batch, self.requests, scheduler_output)
        self._may_reorder_batch(scheduler_output)
        self.input_batch.refresh_metadata()
        return None

    def _zero_block_ids(self, block_ids: list[int]) -> None:
        self._kv_cache_memory.zero_block_ids(block_ids)

    def _prepare_inputs(
        self,
        scheduler_output: SchedulerOutput,
        num_scheduled_tokens: np.ndarray,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Returns the sampled rows, metadata of speculation, and the most tokens of a request."""
        if (
            self._has_plain_inputs
            and self._pp_recv_work is None
            and self._steady_decode.is_next_token(self.input_batch, scheduler_output)
        ):
            if self.lora_config:
                self.set_active_loras(self.input_batch, num_scheduled_tokens)
            return self._steady_decode.prepare(self.input_batch), None, 1
        return super()._prepare_inputs(scheduler_output, num_scheduled_tokens, *args, **kwargs)

    # --- its split, and the metadata of each part --------------------------------------------

    def _determine_batch_execution_and_padding(
        self,
        num_tokens: int,
        num_reqs: int,
        num_scheduled_tokens_np: np.ndarray,
        *args: Any,
        **kwargs: Any,
    ) -> Execution:
        """Plans the step. Always tells vLLM that it is not split."""
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

    # --- its forward -------------------------------------------------------------------------

    def _execute_mm_encoder(self, scheduler_output: SchedulerOutput) -> list[torch.Tensor]:
        if self.model_config.is_encoder_decoder:
            scheduler_output = in_order_of_batch(scheduler_output, self.input_batch.req_id_to_index)
        with self._host_values():
            outputs: list[torch.Tensor] = super()._execute_mm_encoder(scheduler_output)
        return outputs

    def _gather_mm_embeddings(
        self, scheduler_output: SchedulerOutput, shift_computed_tokens: int = 0
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The encoder's outputs [tokens, hidden_size] of the step, and the tokens they belong to:
        int64 indices on the device, or vLLM's mask [tokens]."""
        embeddings, mask = super()._gather_mm_embeddings(scheduler_output, shift_computed_tokens)
        return embeddings, self._encoder_places.of_step(embeddings, mask)

    def _prepare_padding_mask(
        self, num_tokens_unpadded: int, num_tokens_padded: int
    ) -> torch.Tensor:
        """vLLM's mask, without its two launches if the previous step had the same row counts."""
        if self._steady_decode.has_mask(num_tokens_unpadded, num_tokens_padded):
            return self.is_padding[:num_tokens_padded]
        return super()._prepare_padding_mask(num_tokens_unpadded, num_tokens_padded)

    def _model_forward(self, *args: Any, **inputs: Any) -> Any:
        if isinstance(self.model, CUDAGraphWrapper):
            return self.model(*args, **inputs)  # replays, captures, or calls `_forward_as_planned`
        return self._forward_as_planned(*args, **inputs)

    def _forward_as_planned(self, *args: Any, **inputs: Any) -> Any:
        """The model's output for the step, computed whole or in alternating ubatches."""
        model = self.get_model()
        if self._planned.split is None or self.split_forward is None:
            return model(*args, **inputs)
        return self.split_forward.run(self._planned.split, model, *args, **inputs)

    def run_dummy_step(
        self, query_lens: tuple[int, ...], seq_lens: torch.Tensor, num_decodes: int
    ) -> None:
        """Runs an eager step without requests, in ubatches if it is split; vLLM calls the model.

        query_lens:  new tokens of each request, dealt out as vLLM does; seq_lens: all its tokens
        num_decodes: number of leading requests that decode
        """
        model = self.model
        if not isinstance(model, CUDAGraphWrapper):
            self.model = NPUGraphWrapper(model, self.vllm_config, forward=self._forward_as_planned)
        try:
            self._dummy_run(
                sum(query_lens),
                cudagraph_runtime_mode=CUDAGraphMode.NONE,
                force_attention=True,
                is_profile=True,
                skip_eplb=True,
                uniform_decode=num_decodes == len(query_lens),
                create_mixed_batch=0 < num_decodes < len(query_lens),
                profile_seq_lens=seq_lens,
            )
        finally:
            self.model, self._planned = model, WHOLE

    # --- its tokens --------------------------------------------------------------------------

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Samples. Returns None after a failed step, so that vLLM's engine raises the step's error
        instead of hiding it behind an empty output."""
        if self._has_failed:
            self._has_failed = False
            return None
        return self._output_copy.keep(super().sample_tokens(*args, **kwargs), self._early_tokens)

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        """Samples; penalties and bad words read the newest tokens from the device.

        vLLM's method would wait here until the previous step's tokens are on the host.
        """
        batch = self.input_batch
        if spec_decode_metadata is not None or not TokenHistory.is_needed_by(batch):
            self._token_history.forget()
            return super()._sample(logits, spec_decode_metadata)
        with self.sampler.knowing(self._token_history.settle(batch)):
            return self.sampler(logits=logits, sampling_metadata=batch.sampling_metadata)

    def _bookkeeping_sync(
        self,
        scheduler_output: SchedulerOutput,
        sampler_output: SamplerOutput,
        logits: torch.Tensor | None,
        hidden_states: torch.Tensor,
        num_scheduled_tokens: int,
    ) -> Any:
        """vLLM's method. If every request gets one token, all are written at once."""
        batch = self.input_batch
        discarded = self.discard_request_mask.np[: batch.num_reqs]
        if self.speculative_config is not None or not gets_one_token_each(
            batch, sampler_output, discarded
        ):
            return super()._bookkeeping_sync(
                scheduler_output, sampler_output, logits, hidden_states, num_scheduled_tokens
            )
        to_host = None if self.use_async_scheduling else self._to_list
        tokens, logprobs = record(batch, self.requests, sampler_output, to_host)
        prompt_logprobs = self._get_prompt_logprobs_dict(
            hidden_states[:num_scheduled_tokens], scheduler_output.num_scheduled_tokens
        )
        requests, row_of_request = batch.req_ids.copy(), batch.req_id_to_index.copy()
        return {}, None, logprobs, tokens, prompt_logprobs, requests, row_of_request, []

    def _get_prompt_logprobs_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """vLLM's method; with adapters, one request at a time, so that all rows use one adapter."""
        if not self.lora_config or not self.num_prompt_logprobs:
            return super()._get_prompt_logprobs_dict(*args, **kwargs)
        compute = super()._get_prompt_logprobs_dict
        return prompt_logprobs(self, self.lora_manager, lambda: compute(*args, **kwargs))

    def shutdown(self) -> None:
        """vLLM's, without garbage collection: the engine core does it, or the process ends."""
        # The worker has just unfrozen all imported objects, which take half a second to traverse; a
        # forked worker would copy them, too.
        gc.freeze()
        self.graphs.destroy()
        self.splitter.log()
        super().shutdown()
