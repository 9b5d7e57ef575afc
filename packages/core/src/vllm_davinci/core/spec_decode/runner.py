"""Steps of vLLM's runner with drafts, with token counts on the host."""

from typing import Any

import numpy as np
import torch
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.utils import AttentionGroup

from vllm_davinci.core.config.architectures import is_sparse
from vllm_davinci.core.inputs.copied_event import CopiedEvent
from vllm_davinci.core.sampling.output_copy import EarlyTokens
from vllm_davinci.core.spec_decode.device_lengths import DeviceLengths
from vllm_davinci.core.spec_decode.draft_passes import DrafterToCapture
from vllm_davinci.core.spec_decode.host_counts import RejectedDrafts
from vllm_davinci.core.spec_decode.proposers import NPUDraftModelProposer, NPUEagleProposer, on_npu


class SpeculatingRunner(GPUModelRunner):
    """vLLM's runner, which prepares steps from the number of accepted drafts."""

    # vLLM creates them again under these names.
    input_batch: Any
    sampler: Any
    drafter: Any
    _rejected: RejectedDrafts
    _sampled: torch.Tensor | None = None  # of the newest step, while its drafter runs
    _early_tokens: EarlyTokens | None = None

    def _take_drafter(self) -> None:
        """Uses our sampler in the verification of drafts, and our class for the drafter."""
        self._rejected = RejectedDrafts(self.max_num_reqs)
        if self.num_spec_tokens:
            # vLLM waits for it before every synchronous step, even if it is never recorded.
            self.num_accepted_tokens_event = CopiedEvent()
        if self.speculative_config is not None and get_pp_group().is_last_rank:
            self.rejection_sampler = RejectionSampler(
                self.sampler, self.speculative_config, self.device
            )
            self.drafter = on_npu(self.drafter, self._tokens_of_step)

    def _drafter_to_capture(self) -> DrafterToCapture | None:
        """The drafter if its passes can be captured; None if they run eagerly."""
        asked, drafter = self.speculative_config, getattr(self, "drafter", None)
        if (
            asked is None
            or asked.enforce_eager
            or asked.disable_padded_drafter_batch  # rows differ from step to step
            or self.parallel_config.data_parallel_size > 1  # ranks agree on rows, not on passes
            or not isinstance(drafter, NPUEagleProposer | NPUDraftModelProposer)
        ):
            return None
        if isinstance(
            drafter.model, BreakableCUDAGraphWrapper
        ):  # of piecewise graphs, which are never used here
            drafter.model = drafter.model.unwrap()
        query_len = self.uniform_decode_query_len + drafter.net_num_new_slots_per_request
        lengths = None
        if is_sparse(asked.draft_model_config):
            lengths = DeviceLengths(self.max_num_reqs, self.device)
        return DrafterToCapture(drafter, query_len, self._draft_block_table, lengths)

    def _groups(self) -> list[list[AttentionGroup]]:
        """Layers by cache group, and the drafter's own descriptions of its layers."""
        drafter = getattr(self, "drafter", None)
        if not isinstance(drafter, NPUEagleProposer | NPUDraftModelProposer):
            return self.attn_groups
        return [*self.attn_groups, drafter.draft_attn_groups]

    def _draft_block_table(self, num_requests: int) -> torch.Tensor:
        """The drafter's blocks of the first requests: [num_requests, blocks] on the device."""
        tables = self.input_batch.block_table
        table: torch.Tensor = tables[self.drafter.kv_cache_gid].get_device_tensor(num_requests)
        return table

    def _prepare_inputs(
        self,
        scheduler_output: SchedulerOutput,
        num_scheduled_tokens: np.ndarray,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """vLLM's method, with corrected token counts."""
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
        """True if vLLM prepares a step before the host knows the last step's accepted drafts."""
        return bool(
            self.use_async_spec_decode
            and self.valid_sampled_token_count_gpu is not None
            and self.input_batch.prev_req_id_to_index
            and self.prev_num_draft_tokens.np.any()
        )

    def _tokens_of_step(self, counts: torch.Tensor) -> list[int]:
        """Waits for each request's number of tokens in this step.

        counts: [num_requests] on the device, whose copy vLLM has begun under asynchronous
                scheduling
        """
        counted: list[int] = self._get_valid_sampled_token_count()
        return counted or counts.tolist()

    def _update_states_after_model_execute(
        self, output_token_ids: torch.Tensor, scheduler_output: SchedulerOutput
    ) -> None:
        self._sampled, self._early_tokens = output_token_ids, None
        super()._update_states_after_model_execute(output_token_ids, scheduler_output)

    def _copy_valid_sampled_token_count(
        self, next_token_ids: torch.Tensor, valid_sampled_tokens_count: torch.Tensor
    ) -> None:
        """vLLM's method; also copies the tokens themselves, so that the host waits once for both.

        The copies run on their own stream, so their sources are held here until then.
        """
        sampled, self._sampled = self._sampled, None
        stream = self.valid_sampled_token_count_copy_stream
        if stream is None or sampled is None:
            super()._copy_valid_sampled_token_count(next_token_ids, valid_sampled_tokens_count)
            return
        # The previous step's output may still wait for the old event.
        self.valid_sampled_token_count_event = copied = CopiedEvent()
        default = torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            stream.wait_stream(default)
            tokens = sampled.to("cpu", non_blocking=True)
        super()._copy_valid_sampled_token_count(next_token_ids, valid_sampled_tokens_count)
        for read in (sampled, valid_sampled_tokens_count):
            read.record_stream(stream)
        self._early_tokens = EarlyTokens(tokens, copied)

    def _copy_draft_token_ids_to_cpu(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's method; holds the drafts for the copy, which runs on its own stream."""
        super()._copy_draft_token_ids_to_cpu(*args, **kwargs)
        if isinstance(self._draft_token_ids, torch.Tensor):
            self._draft_token_ids.record_stream(self.draft_token_ids_copy_stream)
