"""The steps of vLLM's runner that drafts are part of, with counts on the host."""

from typing import Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_davinci.core.spec_decode.host_counts import RejectedDrafts
from vllm_davinci.core.spec_decode.proposers import on_npu


class SpeculatingRunner(GPUModelRunner):
    """vLLM's runner, which prepares steps after drafts with what was kept of them."""

    # Created anew by vLLM under these names.
    input_batch: Any
    sampler: Any
    drafter: Any
    _rejected: RejectedDrafts

    def _take_drafter(self) -> None:
        """Puts our sampler behind the verification of drafts, and our class before the drafter."""
        self._rejected = RejectedDrafts(self.max_num_reqs)
        if self.speculative_config is not None and get_pp_group().is_last_rank:
            self.rejection_sampler = RejectionSampler(
                self.sampler, self.speculative_config, self.device
            )
            self.drafter = on_npu(self.drafter, self._tokens_of_step)

    def _prepare_inputs(
        self,
        scheduler_output: SchedulerOutput,
        num_scheduled_tokens: np.ndarray,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """vLLM's, of the tokens that there are."""
        if not self._counts_drafts_as_kept():
            return super()._prepare_inputs(scheduler_output, num_scheduled_tokens, *args, **kwargs)
        batch, tokens = self.input_batch, self._get_valid_sampled_token_count()
        with self._rejected.known(batch, self.prev_num_draft_tokens.np, tokens) as rejected:
            inputs = super()._prepare_inputs(
                scheduler_output, num_scheduled_tokens, *args, **kwargs
            )
            self.optimistic_seq_lens_cpu[: len(rejected)] -= torch.from_numpy(rejected)
        return inputs

    def _counts_drafts_as_kept(self) -> bool:
        """Whether vLLM prepares the step before the host knows which drafts were kept."""
        return bool(
            self.use_async_spec_decode
            and self.valid_sampled_token_count_gpu is not None
            and self.input_batch.prev_req_id_to_index
            and self.prev_num_draft_tokens.np.any()
        )

    def _tokens_of_step(self, counts: torch.Tensor) -> list[int]:
        """Waits for the number of tokens that each request has got in this step.

        counts: [num_requests] on the device, whose copy vLLM has begun under asynchronous
                scheduling
        """
        counted: list[int] = self._get_valid_sampled_token_count()
        return counted or counts.tolist()

    def _copy_valid_sampled_token_count(
        self, next_token_ids: torch.Tensor, valid_sampled_tokens_count: torch.Tensor
    ) -> None:
        """vLLM's, on a stream of its own, for which nothing else keeps the counts."""
        super()._copy_valid_sampled_token_count(next_token_ids, valid_sampled_tokens_count)
        if self.valid_sampled_token_count_copy_stream is not None:
            valid_sampled_tokens_count.record_stream(self.valid_sampled_token_count_copy_stream)

    def _copy_draft_token_ids_to_cpu(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's, on a stream of its own, for which nothing else keeps the drafts."""
        super()._copy_draft_token_ids_to_cpu(*args, **kwargs)
        if isinstance(self._draft_token_ids, torch.Tensor):
            self._draft_token_ids.record_stream(self.draft_token_ids_copy_stream)
