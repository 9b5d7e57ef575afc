"""Inputs of steps that decode the previous step's requests again."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.utils import CpuGpuBuffer


class StepBuffers(Protocol):
    """vLLM's buffers of a step's inputs; each still holds the previous step's values.

    By token: input_ids, positions, req_indices, query_pos, is_padding. By request: the others.
    """

    input_ids: CpuGpuBuffer
    positions: torch.Tensor
    req_indices: CpuGpuBuffer
    query_pos: CpuGpuBuffer
    is_padding: torch.Tensor
    query_start_loc: CpuGpuBuffer
    seq_lens: torch.Tensor
    optimistic_seq_lens_cpu: torch.Tensor
    discard_request_mask: CpuGpuBuffer


class SteadyDecode:
    """Prepares a step in which only positions have changed, in few copies.

    vLLM prepares every step for all cases: a dozen small copies and operators, whose launches take
    most of the time. Here nearly all their results are already on the device.

    buffers:   of the runner
    positions: a buffer of int64, one per request
    is_async:  whether the newest tokens are only on the device
    """

    def __init__(self, buffers: StepBuffers, positions: CpuGpuBuffer, is_async: bool) -> None:
        self._buffers = buffers
        self._positions = positions
        self._is_async = is_async
        self._row_numbers = np.arange(len(positions.np) + 1)
        self._masked: tuple[int, int] | None = None  # real rows, and all rows, of the padding mask

    def has_mask(self, num_tokens: int, num_padded: int) -> bool:
        """True if the mask already has these row counts; records them as written."""
        before, self._masked = self._masked, (num_tokens, num_padded)
        return before == self._masked

    def only_moves_on(self, batch: Any, scheduled: SchedulerOutput) -> bool:
        """True if the step runs the batch's requests and only their lengths have changed."""
        cached = scheduled.scheduled_cached_reqs
        return bool(
            cached.req_ids
            and len(cached.req_ids) == batch.num_reqs
            and all(request in batch.req_id_to_index for request in cached.req_ids)
            and not scheduled.scheduled_new_reqs
            and not cached.resumed_req_ids
            and not scheduled.finished_req_ids
            and not scheduled.new_block_ids_to_zero
            and not scheduled.kv_cache_block_copies
        )

    def move_on(self, batch: Any, requests: Mapping[str, Any], scheduled: SchedulerOutput) -> None:
        """Updates token counts and new blocks, without vLLM's case distinctions per request."""
        cached = scheduled.scheduled_cached_reqs
        rows = [batch.req_id_to_index[request] for request in cached.req_ids]
        computed = cached.num_computed_tokens
        for request, tokens in zip(cached.req_ids, computed, strict=True):
            requests[request].num_computed_tokens = tokens
        batch.num_computed_tokens_cpu[rows] = computed
        for request, row, blocks in zip(cached.req_ids, rows, cached.new_block_ids, strict=True):
            if blocks is not None:
                for of_group, new in zip(requests[request].block_ids, blocks, strict=True):
                    of_group.extend(new)
                batch.block_table.append_row(blocks, row)

    def is_next_token(self, batch: Any, scheduled: SchedulerOutput) -> bool:
        """True if every request gets exactly the next token.

        No request is in its prompt then. Their newest tokens are all on the host, or all on the
        device in the rows of the previous step.
        """
        num_reqs = batch.num_reqs
        if (
            scheduled.total_num_scheduled_tokens != num_reqs
            or scheduled.scheduled_new_reqs
            or scheduled.scheduled_cached_reqs.resumed_req_ids
        ):
            return False
        if self._is_async:
            return bool(
                batch.prev_sampled_token_ids is not None
                and batch.prev_req_id_to_index == batch.req_id_to_index
            )
        known = batch.num_tokens_no_spec[:num_reqs]
        return bool(np.array_equal(batch.num_computed_tokens_cpu[:num_reqs] + 1, known))

    def prepare(self, batch: Any) -> slice:
        """Writes the inputs of a step with one token for each request of the batch.

        Writes the same as vLLM's runner, except inputs of speculation and Mamba. Returns the
        sampled rows: all of them, as a slice, so that vLLM's indexing of hidden states is a view
        and no launch.
        """
        to, num_reqs = self._buffers, batch.num_reqs
        batch.block_table.commit_block_table(num_reqs)
        self._write_starts(num_reqs)
        computed = batch.num_computed_tokens_cpu[:num_reqs]
        lengths = to.optimistic_seq_lens_cpu.numpy()
        np.add(computed, 1, out=lengths[:num_reqs])
        lengths[num_reqs:] = 0
        to.seq_lens.copy_(to.optimistic_seq_lens_cpu, non_blocking=True)
        self._positions.np[:num_reqs] = computed
        positions = to.positions[:num_reqs]
        positions.copy_(self._positions.cpu[:num_reqs], non_blocking=True)
        to.discard_request_mask.np[:num_reqs] = False
        to.req_indices.np[:num_reqs] = self._row_numbers[:num_reqs]
        to.query_pos.np[:num_reqs] = 0
        starts = to.query_start_loc.gpu[: num_reqs + 1]
        batch.block_table.compute_slot_mapping(num_reqs, starts, positions)
        sampled = batch.prev_sampled_token_ids
        if sampled is not None:
            to.input_ids.gpu[:num_reqs].copy_(sampled[:num_reqs, 0], non_blocking=True)
        else:
            rows = self._row_numbers[:num_reqs]
            to.input_ids.np[:num_reqs] = batch.token_ids_cpu[rows, computed]
            to.input_ids.copy_to_gpu(num_reqs)
        return slice(num_reqs)

    def _write_starts(self, num_reqs: int) -> None:
        """Writes each request's first row in the step, then the number of all rows."""
        starts, to = np.minimum(self._row_numbers, num_reqs), self._buffers.query_start_loc
        if not np.array_equal(to.np, starts):
            to.np[:] = starts
            to.copy_to_gpu()
