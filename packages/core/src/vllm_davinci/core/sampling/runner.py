"""vLLM's runner, whose host prepares and samples a step while the one before still runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import vllm.envs as envs
from vllm.config import VllmConfig
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import SamplerOutput

from vllm_davinci.core.sampling.newest_tokens import PLACEHOLDER, TokenHistory
from vllm_davinci.core.sampling.sampler import NPUSampler
from vllm_davinci.core.sampling.steady_decode import SteadyDecodeRunner


class SamplingRunner(SteadyDecodeRunner):
    """Takes the newest tokens from the device, where vLLM waits for them or looks for them."""

    prepare_inputs_event: torch.Event | None
    sampler: Any

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        if hasattr(self, "sampler"):
            self.sampler = NPUSampler(self.sampler.logprobs_mode, self.sampler.use_fp64_gumbel)
        self._token_history = TokenHistory()

    def _prepare_input_ids(
        self,
        scheduler_output: SchedulerOutput,
        num_reqs: int,
        total_num_scheduled_tokens: int,
        cu_num_tokens: np.ndarray,
    ) -> None:
        """Tokens of a step. Where the requests of the step before decode once more, in one copy.

        vLLM comes to the same copy after a loop over all of them.
        """
        sampled = self.input_batch.prev_sampled_token_ids
        if (
            sampled is not None
            and num_reqs == total_num_scheduled_tokens
            and not scheduler_output.scheduled_spec_decode_tokens
            and not self.enable_prompt_embeds
            and self._pp_recv_work is None
            and np.array_equal(self.prev_positions.np[:num_reqs], self._row_numbers[:num_reqs])
        ):
            self.input_ids.gpu[:num_reqs].copy_(sampled[:num_reqs, 0], non_blocking=True)
            return
        super()._prepare_input_ids(
            scheduler_output, num_reqs, total_num_scheduled_tokens, cu_num_tokens
        )

    def _bookkeeping_sync(
        self,
        scheduler_output: SchedulerOutput,
        sampler_output: SamplerOutput,
        logits: torch.Tensor | None,
        hidden_states: torch.Tensor,
        num_scheduled_tokens: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """vLLM's. Where every request gets one token, those of all are written at once.

        vLLM writes them request by request, as it does the placeholders of asynchronous scheduling
        for tokens that only the device knows.
        """
        batch, sampled = self.input_batch, sampler_output.sampled_token_ids
        num_reqs = batch.num_reqs
        ends = batch.num_tokens_no_spec[:num_reqs]
        if (
            self.speculative_config is not None
            or envs.VLLM_COMPUTE_NANS_IN_LOGITS
            or sampled.shape != (num_reqs, 1)
            or np.count_nonzero(self.discard_request_mask.np[:num_reqs])
        ):
            return super()._bookkeeping_sync(
                scheduler_output,
                sampler_output,
                logits,
                hidden_states,
                num_scheduled_tokens,
                *args,
                **kwargs,
            )
        rows = self._row_numbers[:num_reqs]
        tokens: list[list[int]] = []  # on the host
        logprobs = None
        if self.use_async_scheduling:
            batch.prev_sampled_token_ids = sampled
            batch.prev_req_id_to_index = batch.req_id_to_index.copy()
            batch.token_ids_cpu[rows, ends] = PLACEHOLDER
            for request in batch.req_ids:
                self.requests[request].output_token_ids.append(PLACEHOLDER)
        else:
            with gpu_sync_allowed():
                tokens = self._to_list(sampled)
                if sampler_output.logprobs_tensors is not None:
                    logprobs = sampler_output.logprobs_tensors.tolists()
            batch.token_ids_cpu[rows, ends] = self.sampled_token_ids_pinned_cpu[:num_reqs, 0]
            for request, newest in zip(batch.req_ids, tokens, strict=True):
                self.requests[request].output_token_ids.extend(newest)
        batch.is_token_ids[rows, ends] = True
        ends += 1
        prompt_logprobs = self._get_prompt_logprobs_dict(
            hidden_states[:num_scheduled_tokens], scheduler_output.num_scheduled_tokens
        )
        requests, row_of_request = batch.req_ids.copy(), batch.req_id_to_index.copy()
        return {}, None, logprobs, tokens, prompt_logprobs, requests, row_of_request, []

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        """Samples; penalties and bad words take the newest tokens from the device.

        vLLM waits here until those of the step before are on the host.
        """
        if spec_decode_metadata is not None or not self._is_newest_on_device():
            self._token_history.forget()
            return super()._sample(logits, spec_decode_metadata)
        self.sampler.newest = self._token_history.settle(self.input_batch)
        try:
            return self.sampler(logits=logits, sampling_metadata=self.input_batch.sampling_metadata)
        finally:
            self.sampler.newest = None

    def _is_newest_on_device(self) -> bool:
        """Whether this step needs tokens that have not come back, and the sampler can do without.

        Processors of users and thinking budgets read them on the host.
        """
        batch = self.input_batch
        holder = batch.sampling_metadata.thinking_budget_state_holder
        return (
            batch.sampled_token_ids_cpu is not None
            and batch.prev_sampled_token_ids is not None
            and bool(batch.sampling_metadata.output_token_ids)
            and not batch.logitsprocs_need_output_token_ids
            and (holder is None or not holder.has_tracked_requests())
        )

    @contextmanager
    def synchronize_input_prep(self) -> Iterator[None]:
        """Keeps a step's inputs until they are copied. Waits only where they are not.

        vLLM always waits, which costs a call of the runtime when there is nothing to wait for.
        """
        event = self.prepare_inputs_event
        if event is not None and not event.query():
            event.synchronize()
        try:
            yield
        finally:
            if event is not None:
                event.record()
