"""Drafts made on the host: from repeated suffixes, or by a class of the user."""

from copy import copy
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.spec_decode.custom_class_proposer import create_custom_proposer
from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_davinci.core.features.speculation import method_on_host
from vllm_davinci.core.inputs.copied_event import CopiedEvent


class _Rows(NamedTuple):
    """The batch's fields that vLLM's proposers read.

    num_tokens_no_spec, num_prompt_tokens: [num_reqs]
    token_ids_cpu: [num_reqs, longest text] int32
    """

    req_ids: list[str]
    req_id_to_index: dict[str, int]
    num_tokens_no_spec: np.ndarray
    num_prompt_tokens: np.ndarray
    token_ids_cpu: np.ndarray


class HostDrafter(BaseSpeculator):
    """Gives a proposer the texts of a step's requests; waits for the step's tokens.

    vLLM's V2 runner has no drafters on the host: this object replaces its n-gram drafter.

    newest: drafts of each request of the newest step, without repeated tokens
    """

    supports_mm_inputs = False
    draft_logits = None

    def __init__(self, replaced: NgramGPUSpeculator, method: str) -> None:
        config = copy(replaced.vllm_config)
        asked = config.speculative_config = copy(replaced.speculative_config)
        asked.method = method
        self._is_suffix = method == "suffix"
        self._proposer: Any = (
            SuffixDecodingProposer if self._is_suffix else create_custom_proposer
        )(config)
        self._num_drafts: int = replaced.num_speculative_steps
        self._drafts = replaced.drafts  # [most requests, drafts] int64
        self._states: Any = replaced.req_states
        most, longest = replaced.max_num_reqs, replaced.max_model_len
        self._tokens = np.zeros((most, longest), dtype=np.int32)
        self._lengths = np.zeros(most, dtype=np.int64)
        self._prompts: list[np.ndarray | None] = [None] * most
        self._back = torch.arange(-self._num_drafts - 1, 0, device=replaced.device)
        self._is_copied = CopiedEvent()
        self.newest: list[list[int]] = []

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Does nothing: there is no graph."""

    def capture(self) -> None:
        """Does nothing: there is no graph."""

    def load_model(self, target: torch.nn.Module) -> None:
        """Calls the proposer's method of this name, if there is one."""
        load = getattr(self._proposer, "load_model", None)
        if load is not None:
            load(target)

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: Any,
        num_sampled: torch.Tensor,
        *args: Any,
        dummy_run: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Drafts, [num_reqs, drafts] int64. Missing drafts repeat the newest token: they are
        rejected unless the model repeats it, too."""
        num_reqs = input_batch.num_reqs
        drafts = self._drafts[:num_reqs]
        if dummy_run:
            return drafts
        slots = input_batch.idx_mapping_np
        sampled = self._sampled(input_batch.idx_mapping, num_sampled[:num_reqs])
        for slot, tokens in zip(slots, sampled, strict=True):
            self._append(slot, tokens)
        lengths = self._lengths[slots]
        texts = self._tokens[slots, : lengths.max()]
        filled = np.repeat(texts[np.arange(num_reqs), lengths - 1, np.newaxis], self._num_drafts, 1)
        rows = _Rows(
            input_batch.req_ids,
            {name: row for row, name in enumerate(input_batch.req_ids)},
            lengths,
            self._states.prompt_len.np[slots],
            texts,
        )
        self.newest = [each[: self._num_drafts] for each in self._propose(rows, sampled)]
        for row, found in enumerate(self.newest):
            filled[row, : len(found)] = found
        pinned = torch.from_numpy(filled.astype(np.int64)).pin_memory()
        return drafts.copy_(pinned, non_blocking=True)

    def _propose(self, rows: _Rows, sampled: list[list[int]]) -> list[list[int]]:
        proposed: list[list[int]]
        if self._is_suffix:
            proposed = self._proposer.propose(self._num_drafts, rows, sampled)
        else:
            texts = rows.num_tokens_no_spec, rows.token_ids_cpu
            proposed = self._proposer.propose(sampled, *texts, slot_mappings=None)
        return proposed

    def _sampled(self, slots: torch.Tensor, num_sampled: torch.Tensor) -> list[list[int]]:
        """Waits for each request's tokens of this step. slots: [num_reqs] int64 on the device"""
        states, most = self._states, self._num_drafts + 1
        tokens = states.all_token_ids.gpu
        ends = states.total_len.gpu.index_select(0, slots).unsqueeze(1)
        places = (ends + self._back).clamp_(min=0) + slots.unsqueeze(1) * tokens.stride(0)
        newest = tokens.view(-1).index_select(0, places.view(-1)).view(-1, most)
        packed = torch.cat([newest, num_sampled.unsqueeze(1).to(newest.dtype)], dim=1)
        copied = packed.to("cpu", non_blocking=True)
        self._is_copied.record()
        self._is_copied.synchronize()
        return [row[most - row[most] : most] for row in copied.tolist()]

    def _append(self, slot: int, tokens: list[int]) -> None:
        """Appends a step's tokens to a text. A new text begins with the request's own tokens."""
        prompt = self._states.prompts[slot]
        if prompt is not self._prompts[slot]:
            self._prompts[slot], self._lengths[slot] = prompt, len(prompt)
            self._tokens[slot, : len(prompt)] = prompt
        begin = self._lengths[slot]
        end = min(begin + len(tokens), self._tokens.shape[1])
        self._tokens[slot, begin:end] = tokens[: end - begin]
        self._lengths[slot] = end


def drafting_on_host(speculator: BaseSpeculator) -> BaseSpeculator:
    """Replaces vLLM's n-gram drafter if another method on the host was asked for."""
    if not isinstance(speculator, NgramGPUSpeculator):
        return speculator
    method = method_on_host(speculator.speculative_config)
    return speculator if method is None else HostDrafter(speculator, method)
