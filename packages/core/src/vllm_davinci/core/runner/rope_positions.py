"""Positions of models whose rotary embedding has several dimensions (M-RoPE), from the host."""

from typing import cast

import numpy as np
import torch
from torch import nn
from vllm.model_executor.models.interfaces import SupportsMRoPE
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.mm.rope import RopeState


class NPURopeState(RopeState):
    """vLLM's state without its table on the device, which reserves the longest request per slot.

    step:    the batch whose positions are prepared
    prompts: by slot, [num_dims, tokens] int64: positions of the request's initial tokens
    deltas:  by slot, int64: position minus index of each later token
    """

    step: InputBatch
    prompts: list[np.ndarray]
    deltas: np.ndarray

    @classmethod
    def taking_over(cls, state: RopeState) -> "NPURopeState":
        """Converts the object to this class; it keeps the buffer of a step's positions."""
        state.__class__ = cls
        assert isinstance(state, cls)
        del state.prefill_positions, state.prefill_delta
        state.prompts = [np.zeros((state.num_dims, 0), np.int64)] * state.max_num_reqs
        state.deltas = np.zeros(state.max_num_reqs, dtype=np.int64)
        return state

    def init_prefill_positions(
        self, req_idx: int, model: nn.Module, prefill_token_ids: list[int], mm_features: list
    ) -> None:
        with_positions = cast(SupportsMRoPE, model)
        of_prompt = with_positions.get_mrope_input_positions(prefill_token_ids, mm_features)
        self.update_prefill_positions(req_idx, *of_prompt)

    def apply_staged_writes(self) -> None:
        """Does nothing: `prepare_positions` copies what a step needs."""

    def read_prefill_positions(self, req_idx: int, length: int) -> torch.Tensor:
        return async_tensor_h2d(self.prompts[req_idx][:, :length], self.device)

    def update_prefill_positions(self, req_idx: int, positions: torch.Tensor, delta: int) -> None:
        self.prompts[req_idx] = positions.cpu().numpy().astype(np.int64)
        self.deltas[req_idx] = delta

    def prepare_positions(
        self,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        prefill_lens: torch.Tensor,
        num_computed_tokens: torch.Tensor,
    ) -> None:
        """Writes the positions of `step`, whose host arrays have the values of the arguments."""
        step = self.step
        starts = step.query_start_loc_np[: step.num_reqs]
        lengths, slots = step.num_scheduled_tokens, step.idx_mapping_np
        own = step.num_computed_tokens_np - starts + self.deltas[slots]
        of_tokens = np.arange(step.num_tokens) + np.repeat(own, lengths)
        positions = np.tile(of_tokens, (self.num_dims, 1))
        for request in np.flatnonzero(step.num_computed_tokens_np < step.prefill_len_np):
            row, computed = starts[request], step.num_computed_tokens_np[request]
            of_prompt = self.prompts[slots[request]][:, computed : computed + lengths[request]]
            positions[:, row : row + of_prompt.shape[1]] = of_prompt
        # Copying into strided rows of the host would take one copy per row.
        on_device = async_tensor_h2d(positions, self.device)
        self.positions[:, : step.num_tokens].copy_(on_device)
