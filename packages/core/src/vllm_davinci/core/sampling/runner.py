"""vLLM's runner, whose host prepares and samples a step while the one before still runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_davinci.core.sampling.newest_tokens import TokenHistory
from vllm_davinci.core.sampling.sampler import NPUSampler


class SamplingRunner(GPUModelRunner):
    """Takes the newest tokens from the device, where vLLM waits for them or looks for them."""

    prepare_inputs_event: torch.Event | None
    sampler: Any

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        if hasattr(self, "sampler"):
            self.sampler = NPUSampler(self.sampler.logprobs_mode, self.sampler.use_fp64_gumbel)
        self._token_history = TokenHistory()
        self._row_numbers = np.arange(self.max_num_reqs)

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
