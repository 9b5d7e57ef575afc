"""Writes prompt embeddings, given instead of token ids, into a step's embeddings."""

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.prompt_embeds import PromptEmbedsState


class NPUPromptEmbeds(PromptEmbedsState):
    """vLLM's state without its address tables: the host knows which rows a step needs.

    embeds: request -> its embeddings [tokens, hidden_size] on the device, and a mask of tokens that
    came as ids instead, [tokens] bool on the host; None if none did
    """

    embeds: dict[str, tuple[torch.Tensor, np.ndarray | None]]

    @classmethod
    def taking_over(cls, state: PromptEmbedsState) -> "NPUPromptEmbeds":
        """Converts the object to this class."""
        state.__class__ = cls
        assert isinstance(state, cls)
        for table in ("gpu_tensors", "embeds_ptrs", "mask_ptrs", "embeds_lens"):
            delattr(state, table)
        state.embeds = {}
        return state

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        given, are_ids = new_req_data.prompt_embeds, new_req_data.prompt_is_token_ids
        if given is None:
            self.remove_request(new_req_data.req_id)
            return
        on_device = async_tensor_h2d(given, device=self.device, dtype=self.dtype)
        mask = None if are_ids is None else np.asarray(are_ids, dtype=bool)
        self.embeds[new_req_data.req_id] = on_device, mask

    def remove_request(self, req_id: str) -> None:
        self.embeds.pop(req_id, None)

    def apply_staged_writes(self) -> None:
        """Does nothing: no writes are staged."""

    def apply(
        self,
        input_batch: InputBatch,
        num_computed_tokens: torch.Tensor,
        inputs_embeds: torch.Tensor,
    ) -> None:
        """Writes the step's rows of each request that has embeddings.

        inputs_embeds: [rows, hidden_size] of the step, in place
        """
        for request, name in enumerate(input_batch.req_ids):
            embeds, are_ids = self.embeds.get(name, (None, None))
            first = int(input_batch.num_computed_tokens_np[request])
            if embeds is None or first >= len(embeds):
                continue
            last = min(first + int(input_batch.num_scheduled_tokens[request]), len(embeds))
            row = int(input_batch.query_start_loc_np[request])
            if are_ids is None:
                inputs_embeds[row : row + last - first].copy_(embeds[first:last])
                continue
            places = np.flatnonzero(~are_ids[first:last])
            from_to = async_tensor_h2d(np.stack([places + first, places + row]), self.device)
            taken = embeds.index_select(0, from_to[0])
            inputs_embeds.index_copy_(0, from_to[1], taken)
