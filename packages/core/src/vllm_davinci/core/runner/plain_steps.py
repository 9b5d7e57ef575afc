"""Inputs of steps without drafts, of which the host knows everything except the newest tokens."""

from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.states import RequestState

from vllm_davinci.core.runner.buffers import take_over_tables


class NPURequestState(RequestState):
    """vLLM's request tables, with the prompts' tokens on the host.

    prompts: by slot, int32: the request's initial tokens
    is_new:  by slot: whether the request arrived after the newest step was sampled
    """

    prompts: list[np.ndarray | None]
    is_new: np.ndarray

    @classmethod
    def taking_over(cls, states: RequestState) -> "NPURequestState":
        """Converts the object to this class, with tables that are copied only if changed."""
        states.__class__ = cls
        assert isinstance(states, cls)
        take_over_tables(states)
        states.prompts = [None] * states.max_num_reqs
        states.is_new = np.ones(states.max_num_reqs, dtype=bool)
        return states

    def add_request(
        self, req_id: str, prompt_len: int, all_token_ids: list[int], *args: Any, **kwargs: Any
    ) -> None:
        super().add_request(req_id, prompt_len, all_token_ids, *args, **kwargs)
        slot = self.req_id_to_index[req_id]
        self.prompts[slot] = np.array(all_token_ids, dtype=np.int32)
        self.is_new[slot] = True


class _Copied(NamedTuple):
    """The content of a device buffer. host: its bytes; on_device: the tensor"""

    host: bytes
    on_device: torch.Tensor


class PlainSteps:
    """Prepares a step in few copies, from values on the host; vLLM computes them on the device.

    Unchanged buffers are not copied again: in most decode steps only positions and lengths change.

    buffers: the runner's: a step's inputs always have the same addresses
    """

    def __init__(self, states: NPURequestState, buffers: InputBuffers) -> None:
        self._states = states
        self._buffers = buffers
        device, most = buffers.device, buffers.max_num_reqs
        self._numbers = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._zeros = torch.zeros(most, dtype=torch.int32, device=device)
        self._starts: bytes | None = None
        self._slots: _Copied | None = None
        self._masked: tuple[int, int] | None = None  # real rows, and all rows

    def forget(self) -> None:
        """Call it after other code has written the buffers."""
        self._starts = self._masked = None

    def prepare(
        self, batch: Any, descriptor: BatchExecutionDescriptor, has_grammars: bool
    ) -> InputBatch:
        """Prepares the batch of a step. batch: vLLM's facts about it on the host, in its order"""
        buffers, states = self._buffers, self._states
        num_reqs, num_tokens = len(batch.req_ids), int(batch.num_tokens)
        num_padded = max(num_tokens, descriptor.num_tokens)
        num_reqs_padded = descriptor.num_reqs or num_reqs
        lengths = batch.num_scheduled_tokens
        computed = states.num_computed_tokens_np[batch.idx_mapping_np]
        slots = self._on_device(batch.idx_mapping_np)

        starts, seq_lens = self._write_lengths(lengths, computed)
        if num_tokens == num_reqs:
            positions = computed.astype(np.int64)
            sampled: Any = slice(num_reqs)
        else:
            positions = np.arange(num_tokens) + np.repeat(computed - starts[:num_reqs], lengths)
            ends = starts[1 : num_reqs + 1].astype(np.int64) - 1
            sampled = torch.from_numpy(ends).pin_memory().to(buffers.device, non_blocking=True)
        _copy(positions, buffers.positions[:num_tokens])
        self._write_ids(batch, slots, starts, computed, num_tokens)
        self._mask_padding(num_tokens, num_padded)
        return InputBatch(
            req_ids=batch.req_ids,
            num_reqs=num_reqs,
            num_reqs_after_padding=num_reqs_padded,
            idx_mapping=slots,
            idx_mapping_np=batch.idx_mapping_np,
            expanded_idx_mapping=slots,
            expanded_local_pos=self._zeros[:num_reqs],
            num_scheduled_tokens=lengths,
            num_tokens=num_tokens,
            num_tokens_after_padding=num_padded,
            num_draft_tokens=0,
            num_draft_tokens_per_req=None,
            query_start_loc=buffers.query_start_loc[: num_reqs_padded + 1],
            query_start_loc_np=starts[: num_reqs_padded + 1],
            seq_lens=buffers.seq_lens[:num_reqs_padded],
            seq_lens_cpu_upper_bound=torch.from_numpy(seq_lens[:num_reqs_padded]),
            dcp_local_seq_lens=None,
            num_computed_tokens_np=computed,
            prefill_len_np=batch.prefill_len_np,
            num_computed_prefill_tokens_np=batch.num_computed_prefill_tokens_np,
            is_prefilling_np=batch.is_prefilling_np,
            has_prefill=batch.has_prefill,
            prefill_runs_as_decode_np=batch.prefill_runs_as_decode_np,
            decode_graph_eligible=batch.decode_graph_eligible,
            max_seq_len_np=batch.max_seq_len_np,
            input_ids=buffers.input_ids[:num_padded],
            positions=buffers.positions[:num_padded],
            is_padding=buffers.is_padding[:num_padded],
            logits_indices=sampled,
            cu_num_logits=self._numbers[: num_reqs + 1],
            cu_num_logits_np=np.arange(num_reqs + 1, dtype=np.int32),
            has_structured_output_reqs=has_grammars,
            prompt_lens=None,
        )

    def _write_lengths(
        self, lengths: np.ndarray, computed: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Writes and returns each request's first row and total tokens; then the end, and 0."""
        buffers, num_reqs = self._buffers, len(lengths)
        starts = np.zeros(buffers.max_num_reqs + 1, dtype=np.int32)
        np.cumsum(lengths, out=starts[1 : num_reqs + 1])
        starts[num_reqs + 1 :] = starts[num_reqs]
        if starts.tobytes() != self._starts:
            self._starts = starts.tobytes()
            _copy(starts, buffers.query_start_loc)
        seq_lens = np.zeros(buffers.max_num_reqs, dtype=np.int32)
        np.add(computed, lengths, out=seq_lens[:num_reqs])
        _copy(seq_lens, buffers.seq_lens)
        return starts, seq_lens

    def _on_device(self, slots: np.ndarray) -> torch.Tensor:
        """The requests' slots, [num_reqs] int64; reuses the previous step's tensor if equal."""
        host = slots.tobytes()
        if self._slots is None or self._slots.host != host:
            pinned = torch.from_numpy(slots.astype(np.int64)).pin_memory()
            copied = pinned.to(self._buffers.device, non_blocking=True)
            self._slots = _Copied(host, copied)
        return self._slots.on_device

    def _write_ids(
        self,
        batch: Any,
        slots: torch.Tensor,
        starts: np.ndarray,
        computed: np.ndarray,
        num_tokens: int,
    ) -> None:
        """Writes prompts' tokens from the host, and the newest tokens of other requests."""
        ids, newest = self._buffers.input_ids, self._states.last_sampled_tokens[:, 0]
        is_output = computed >= batch.prefill_len_np
        num_outputs = int(np.count_nonzero(is_output))
        if num_outputs < len(slots):
            tokens = np.zeros(num_tokens, dtype=np.int32)
            for row in np.flatnonzero(~is_output):
                prompt = self._states.prompts[batch.idx_mapping_np[row]]
                assert prompt is not None
                first, last = starts[row], starts[row + 1]
                tokens[first:last] = prompt[computed[row] : computed[row] + last - first]
            _copy(tokens, ids[:num_tokens])
        if num_outputs == 0:
            return
        if is_output[:num_outputs].all():  # vLLM puts them first, one row each
            ids[:num_outputs].copy_(newest.index_select(0, slots[:num_outputs]))
            return
        rows = np.flatnonzero(is_output)
        pinned = torch.from_numpy(np.stack([starts[rows], rows]).astype(np.int64)).pin_memory()
        places, requests = pinned.to(ids.device, non_blocking=True).unbind()
        tokens_of = newest.index_select(0, slots.index_select(0, requests))
        ids.index_copy_(0, places, tokens_of.to(ids.dtype))

    def _mask_padding(self, num_tokens: int, num_padded: int) -> None:
        if self._masked != (num_tokens, num_padded):
            self._masked = num_tokens, num_padded
            self._buffers.is_padding[:num_tokens].fill_(False)
            self._buffers.is_padding[num_tokens:num_padded].fill_(True)


def _copy(values: np.ndarray, to: torch.Tensor) -> None:
    """Copies to the device from pinned memory, which torch holds until the copy is done."""
    to.copy_(torch.from_numpy(values).pin_memory(), non_blocking=True)
