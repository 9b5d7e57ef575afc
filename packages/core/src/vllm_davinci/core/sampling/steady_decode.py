"""vLLM's runner, whose inputs are few copies where nothing but the positions has moved."""

from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class SteadyDecodeRunner(GPUModelRunner):
    """Prepares steps that decode the requests of the step before once more.

    vLLM prepares every step for all cases: a dozen small copies and operators, whose launches take
    most of the time. Here nearly all of what they write is on the device already.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._row_numbers = np.arange(self.max_num_reqs + 1)
        self._rows = torch.arange(self.max_num_reqs, dtype=torch.int32, device=device)
        self._decode_positions = self._make_buffer(self.max_num_reqs, dtype=torch.int64)
        self._has_plain_positions = not (
            self.uses_mrope
            or self.uses_xdrope_dim > 0
            or self.enable_prompt_embeds
            or self.lora_config
            or self.speculative_config is not None
        )

    def _prepare_inputs(
        self,
        scheduler_output: SchedulerOutput,
        num_scheduled_tokens: np.ndarray,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Indices of the rows that are sampled, no metadata of speculation, and 1 token each.

        Writes what vLLM's does, but for what only speculation and Mamba read.
        """
        batch = self.input_batch
        num_reqs = batch.num_reqs
        if not self._is_steady(scheduler_output, num_reqs):
            return super()._prepare_inputs(scheduler_output, num_scheduled_tokens, *args, **kwargs)
        batch.block_table.commit_block_table(num_reqs)
        self._write_starts(num_reqs)
        computed = batch.num_computed_tokens_cpu[:num_reqs]
        lengths = self.optimistic_seq_lens_cpu.numpy()
        np.add(computed, 1, out=lengths[:num_reqs])
        lengths[num_reqs:] = 0
        self.seq_lens.copy_(self.optimistic_seq_lens_cpu, non_blocking=True)
        self._decode_positions.np[:num_reqs] = computed
        positions = self.positions[:num_reqs]
        positions.copy_(self._decode_positions.cpu[:num_reqs], non_blocking=True)
        self.discard_request_mask.np[:num_reqs] = False
        self.req_indices.np[:num_reqs] = self._row_numbers[:num_reqs]
        self.query_pos.np[:num_reqs] = 0
        starts = self.query_start_loc.gpu[: num_reqs + 1]
        batch.block_table.compute_slot_mapping(num_reqs, starts, positions)
        sampled = batch.prev_sampled_token_ids
        assert sampled is not None
        self.input_ids.gpu[:num_reqs].copy_(sampled[:num_reqs, 0], non_blocking=True)
        return self._rows[:num_reqs], None, 1

    def _is_steady(self, scheduler_output: SchedulerOutput, num_reqs: int) -> bool:
        """Whether all requests stand in the rows of the step before, and get one token each.

        Their newest tokens are on the device then, and none of them is still a prompt.
        """
        batch = self.input_batch
        return bool(
            self._has_plain_positions
            and batch.prev_sampled_token_ids is not None
            and scheduler_output.total_num_scheduled_tokens == num_reqs
            and not scheduler_output.scheduled_new_reqs
            and not scheduler_output.scheduled_cached_reqs.resumed_req_ids
            and self._pp_recv_work is None
            and batch.prev_req_id_to_index == batch.req_id_to_index
        )

    def _write_starts(self, num_reqs: int) -> None:
        """Each request's first row of the step; after the last one all rows."""
        starts = np.minimum(self._row_numbers, num_reqs)
        if not np.array_equal(self.query_start_loc.np, starts):
            self.query_start_loc.np[:] = starts
            self.query_start_loc.copy_to_gpu()
