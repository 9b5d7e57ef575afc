"""A thin subclass of vLLM's V1 runner, which calls the parts of a step in their order."""

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch_npu
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.distributed.parallel_state import get_pp_group
from vllm.model_executor.models import supports_lora
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import SamplerOutput

from vllm_davinci.core.attention.mla.layer import NPUMLAAttention
from vllm_davinci.core.device import torch_cuda_names
from vllm_davinci.core.device.soc import soc_of
from vllm_davinci.core.errors import UnsupportedFeatureError
from vllm_davinci.core.fused_moe.layer_counts import layer_counts
from vllm_davinci.core.graph.capture import GraphCapture
from vllm_davinci.core.inputs.copied_event import CopiedEvent
from vllm_davinci.core.inputs.steady_decode import SteadyDecode
from vllm_davinci.core.lora.adapter_manager import NPUWorkerLoRAManager
from vllm_davinci.core.lora.prompt_logprobs import prompt_logprobs
from vllm_davinci.core.sampling.bookkeeping import gets_one_token_each, record
from vllm_davinci.core.sampling.newest_tokens import TokenHistory
from vllm_davinci.core.sampling.output_copy import OutputCopy
from vllm_davinci.core.sampling.sampler import NPUSampler
from vllm_davinci.core.spec_decode.drafters import with_own_drafter
from vllm_davinci.core.ubatch.runner import SplittingRunner


class NPUModelRunner(SplittingRunner):
    """Runs one step: vLLM prepares the batch and samples, the parts here place it on the NPU.

    vLLM's `execute_model` and `sample_tokens` call the overridden methods in the order in which
    they stand here. A part knows no other part; what one needs of another passes through here.
    The classes below this one add one part each: ubatches, the checkpoint's weights, the KV cache,
    balanced experts and drafts.
    """

    # Created anew by vLLM under these names.
    model: Any
    num_prompt_logprobs: dict[str, int]
    prepare_inputs_event: torch.Event | None

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        torch_cuda_names.install()
        super().__init__(with_own_drafter(vllm_config), device)
        self._steady_decode = SteadyDecode(
            self, self._make_buffer(self.max_num_reqs, dtype=torch.int64), self.use_async_scheduling
        )
        self._take_ubatches()
        self.graphs = GraphCapture(
            self,
            vllm_config,
            self.cudagraph_dispatcher,
            self.uniform_decode_query_len,
            soc_of(current_platform.get_device_name()).graphs,
        )
        self.sampler = NPUSampler(self.sampler.logprobs_mode, self.sampler.use_fp64_gumbel)
        self._take_drafter()
        self._token_history = TokenHistory()

        self._has_plain_inputs = not (
            self.uses_mrope
            or self.enable_prompt_embeds
            or self.speculative_config is not None
            or self.cache_config.kv_sharing_fast_prefill  # wants indices of the sampled rows
        )
        if self.use_async_scheduling or self.parallel_config.pipeline_parallel_size > 1:
            # A stage that hands its output on waits for no device either. Without this, the host
            # fills the next step's inputs into memory that the copies of this one still read.
            self.prepare_inputs_event = CopiedEvent()
        self._take_kv_cache()

        self._output_copy = OutputCopy()
        self._has_failed = False  # the newest step, and there is nothing to sample
        self._is_settled = True  # nothing is left on the device of a step that raised

    # --- the start: weights and graphs --------------------------------------------------------

    def load_model(self, load_dummy_weights: bool = False, **options: Any) -> None:
        super().load_model(load_dummy_weights, **options)
        model = self.get_model()
        self._mla_layers = [each for each in model.modules() if isinstance(each, NPUMLAAttention)]
        if isinstance(self.model, CUDAGraphWrapper):  # vLLM's own names torch.cuda's graphs
            self.model = self.graphs.wrap(model, self._forward_as_planned)

    def load_lora_model(
        self, model: torch.nn.Module, vllm_config: VllmConfig, device: torch.device
    ) -> torch.nn.Module:
        """Wraps the layers that take adapters. Returns the model."""
        if not supports_lora(model):
            raise UnsupportedFeatureError(
                f"{type(model).__name__} does not support LoRA in vLLM. Start without "
                "--enable-lora."
            )
        self.lora_manager = NPUWorkerLoRAManager(vllm_config, device, model.embedding_modules)
        wrapped: torch.nn.Module = self.lora_manager.create_lora_manager(model, vllm_config)
        return wrapped

    def profile_run(self, *args: Any, **kwargs: Any) -> None:
        super().profile_run(*args, **kwargs)
        self.graphs.measure_workspaces()

    def capture_model(self) -> int:
        self._check_outputs_with_attention()
        layers = layer_counts(self.get_model(), self.kv_cache_config, get_pp_group().is_first_rank)
        ubatches, drafter = self.splitter.ubatches_of_graph, self._drafter_to_capture()
        return self.graphs.capture(layers, ubatches, drafter)

    # --- a step: its batch and inputs --------------------------------------------------------

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_settled:
            # A whole step ends with a wait for its tokens. One that raised has not come to it, and
            # its copies may still read the memory that this step's inputs are written into.
            torch_npu.npu.synchronize(self.device)
        for layer in self._mla_layers:
            layer.follow_weights()
        self._has_failed, self._is_settled = True, False
        output = super().execute_model(*args, **kwargs)
        self._has_failed, self._is_settled = False, True
        return output

    def _update_states(self, scheduler_output: SchedulerOutput) -> Callable[..., Any] | None:
        """Brings the batch up to date: blocks of the cache first, which requests get copies of."""
        scheduler_output = self._with_blocks_copied(scheduler_output)
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

    def _prepare_inputs(
        self,
        scheduler_output: SchedulerOutput,
        num_scheduled_tokens: np.ndarray,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The rows that are sampled, metadata of speculation, and most tokens of a request."""
        if (
            self._has_plain_inputs
            and self._pp_recv_work is None
            and self._steady_decode.is_next_token(self.input_batch, scheduler_output)
        ):
            if self.lora_config:
                self.set_active_loras(self.input_batch, num_scheduled_tokens)
            return self._steady_decode.prepare(self.input_batch), None, 1
        return super()._prepare_inputs(scheduler_output, num_scheduled_tokens, *args, **kwargs)

    # --- its forward -------------------------------------------------------------------------

    def _prepare_padding_mask(
        self, num_tokens_unpadded: int, num_tokens_padded: int
    ) -> torch.Tensor:
        """vLLM's, without its two launches where the step before had as many rows."""
        if self._steady_decode.has_mask(num_tokens_unpadded, num_tokens_padded):
            return self.is_padding[:num_tokens_padded]
        return super()._prepare_padding_mask(num_tokens_unpadded, num_tokens_padded)

    def _model_forward(self, *args: Any, **inputs: Any) -> Any:
        if isinstance(self.model, CUDAGraphWrapper):
            return self.model(*args, **inputs)  # replays, captures, or calls `_forward_as_planned`
        return self._forward_as_planned(*args, **inputs)

    # --- its tokens --------------------------------------------------------------------------

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Samples. Returns None after a step that raised: vLLM's engine raises its error then,
        which an empty output would hide."""
        if self._has_failed:
            self._has_failed = False
            return None
        return self._output_copy.keep(super().sample_tokens(*args, **kwargs), self._early_tokens)

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        """Samples; penalties and bad words take the newest tokens from the device.

        vLLM waits here until those of the step before are on the host.
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
        """vLLM's. Where every request gets one token, those of all are written at once."""
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
        """vLLM's; with adapters one request at a time, whose rows are all of one adapter."""
        if not self.lora_config or not self.num_prompt_logprobs:
            return super()._get_prompt_logprobs_dict(*args, **kwargs)
        compute = super()._get_prompt_logprobs_dict
        return prompt_logprobs(self, self.lora_manager, lambda: compute(*args, **kwargs))

    def shutdown(self) -> None:
        """vLLM's, without its search for garbage: the engine core does one, or the process ends."""
        # The worker has just unfrozen all that was imported, which takes half a second to walk
        # through; a forked worker would copy it, too.
        gc.freeze()
        self.graphs.destroy()
        self.splitter.log()
        super().shutdown()
