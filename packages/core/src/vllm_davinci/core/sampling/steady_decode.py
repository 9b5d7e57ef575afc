"""vLLM's runner, whose inputs are few copies where nothing but the positions has moved."""

from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.distributed.parallel_state import get_pp_group
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
        self._masked: tuple[int, int] | None = None  # rows that count, and all, of the padding mask
        self._decode_positions = self._make_buffer(self.max_num_reqs, dtype=torch.int64)
        self._has_plain_positions = not (
            self.uses_mrope
            or self.enable_prompt_embeds
            or self.lora_config
            or self.speculative_config is not None
            or self.cache_config.kv_sharing_fast_prefill  # wants indices of the sampled rows
        )

    def _prepare_padding_mask(
        self, num_tokens_unpadded: int, num_tokens_padded: int
    ) -> torch.Tensor:
        """vLLM's, without its two launches where the step before had as many rows.

        Returns [num_tokens_padded], bool.
        """
        rows = num_tokens_unpadded, num_tokens_padded
        if self._masked == rows:
            return self.is_padding[:num_tokens_padded]
        self._masked = rows
        return super()._prepare_padding_mask(*rows)

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        """vLLM's. Where the batch only decodes on, what has moved: counts of tokens, new blocks.

        vLLM goes through every case of a request for each of them.
        """
        batch, cached = self.input_batch, scheduler_output.scheduled_cached_reqs
        rows = [batch.req_id_to_index.get(request) for request in cached.req_ids]
        if (
            not self._has_plain_positions
            or len(rows) != batch.num_reqs
            or None in rows
            or not rows
            or scheduler_output.scheduled_new_reqs
            or cached.resumed_req_ids
            or scheduler_output.finished_req_ids
            or scheduler_output.new_block_ids_to_zero
            or scheduler_output.kv_cache_block_copies
            or not get_pp_group().is_last_rank
            or has_kv_transfer_group()
        ):
            return super()._update_states(scheduler_output)
        self._process_encoder_cache_scheduler_output(scheduler_output)
        computed = cached.num_computed_tokens
        for request, tokens in zip(cached.req_ids, computed, strict=True):
            self.requests[request].num_computed_tokens = tokens
        batch.num_computed_tokens_cpu[rows] = computed
        for index, blocks in enumerate(cached.new_block_ids):
            if blocks is not None:
                request = cached.req_ids[index]
                held = self.requests[request].block_ids
                for of_group, new in zip(held, blocks, strict=True):
                    of_group.extend(new)
                batch.block_table.append_row(blocks, batch.req_id_to_index[request])
        self._may_reorder_batch(scheduler_output)
        batch.refresh_metadata()
        return None

    def _prepare_inputs(
        self,
        scheduler_output: SchedulerOutput,
        num_scheduled_tokens: np.ndarray,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The rows that are sampled, no metadata of speculation, and 1 token each.

        Writes what vLLM's does, but for what only speculation and Mamba read. The rows are all of
        them, as a slice: vLLM takes them out of the hidden states by indexing, which is a view then
        and no launch.
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
        if sampled is not None:
            self.input_ids.gpu[:num_reqs].copy_(sampled[:num_reqs, 0], non_blocking=True)
        else:
            rows = self._row_numbers[:num_reqs]
            self.input_ids.np[:num_reqs] = batch.token_ids_cpu[rows, computed]
            self.input_ids.copy_to_gpu(num_reqs)
        return slice(num_reqs), None, 1

    def _is_steady(self, scheduler_output: SchedulerOutput, num_reqs: int) -> bool:
        """Whether all requests get the one token that follows on those they have.

        None of them is still a prompt then. Their newest tokens are all on the host, or all on the
        device in the rows of the step before.
        """
        batch = self.input_batch
        if (
            not self._has_plain_positions
            or scheduler_output.total_num_scheduled_tokens != num_reqs
            or scheduler_output.scheduled_new_reqs
            or scheduler_output.scheduled_cached_reqs.resumed_req_ids
            or self._pp_recv_work is not None
        ):
            return False
        if self.use_async_scheduling:
            return bool(
                batch.prev_sampled_token_ids is not None
                and batch.prev_req_id_to_index == batch.req_id_to_index
            )
        known = batch.num_tokens_no_spec[:num_reqs]
        return bool(np.array_equal(batch.num_computed_tokens_cpu[:num_reqs] + 1, known))

    def _write_starts(self, num_reqs: int) -> None:
        """Each request's first row of the step; after the last one all rows."""
        starts = np.minimum(self._row_numbers, num_reqs)
        if not np.array_equal(self.query_start_loc.np, starts):
            self.query_start_loc.np[:] = starts
            self.query_start_loc.copy_to_gpu()
