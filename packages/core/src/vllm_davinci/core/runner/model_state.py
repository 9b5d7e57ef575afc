"""A step's model state: attention metadata, recurrent states, embeddings."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from vllm.config import CUDAGraphMode
from vllm.model_executor.models.interfaces import SupportsMRoPE
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner
from vllm.v1.worker.gpu.mm.rope import RopeState
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.encoder_decoder import EncoderDecoderModelState
from vllm.v1.worker.gpu.model_states.encoder_only import EncoderOnlyModelState
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
from vllm.v1.worker.gpu.model_states.prompt_embeds import PromptEmbedsState
from vllm.v1.worker.gpu.ubatch_utils import _slice_input_batch
from vllm.v1.worker.ubatch_utils import UBatchSlice
from vllm.v1.worker.utils import AttentionGroup

from vllm_davinci.core.multimodal.encoder_places import EncoderPlaces
from vllm_davinci.core.multimodal.host_values import host_values
from vllm_davinci.core.runner.adoption import behind
from vllm_davinci.core.runner.buffers import take_over_tables
from vllm_davinci.core.runner.ubatches import StepPlans


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


# These need no per-request state on the device in steps without drafts.
PLAIN = (DefaultModelState, EncoderDecoderModelState, EncoderOnlyModelState, MambaHybridModelState)


class NPUModelState(ModelState):
    """vLLM's state of a model; stores the newest step's metadata for a graph's replay.

    is_plain: True if the model has no per-request state on the device
    plans:    execution plans of the target's steps
    newest_metadata: by layer, of the whole step, or of a drafter's pass
    as_run:   the metadata with which the target runs: per ubatch in a split step
    """

    newest_metadata: dict[str, Any] | None = None
    as_run: Any = None
    is_plain: bool
    plans: StepPlans
    rope_state: NPURopeState | None = None

    @staticmethod
    def taking_over(state: ModelState, plans: StepPlans) -> "NPUModelState":
        """Converts the object to a class with our base first, then vLLM's for this model."""
        plain = type(state) in PLAIN
        state.__class__ = behind(NPUModelState, type(state))
        assert isinstance(state, NPUModelState)
        state.is_plain, state.plans = plain, plans
        if getattr(state, "prompt_embeds_state", None) is not None:
            NPUPromptEmbeds.taking_over(state.prompt_embeds_state)
        if state.rope_state is not None:
            NPURopeState.taking_over(state.rope_state)
        if state.supports_mm_inputs:
            NPUEncoderRunner.taking_over(state.encoder_runner)
        take_over_tables(state)
        return state

    def prepare_inputs(self, input_batch: InputBatch, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if self.rope_state is not None:
            self.rope_state.step = input_batch
        inputs: dict[str, Any] = super().prepare_inputs(input_batch, *args, **kwargs)
        return inputs

    def prepare_attn(
        self,
        input_batch: InputBatch,
        cudagraph_mode: CUDAGraphMode,
        block_tables: tuple[torch.Tensor, ...],
        slot_mappings: torch.Tensor,
        attn_groups: list[list[AttentionGroup]],
        kv_cache_config: KVCacheConfig,
        for_capture: bool = False,
        ubatch_idx: int = 0,
    ) -> dict[str, Any]:
        build = super().prepare_attn
        of_model = attn_groups, kv_cache_config
        metadata: dict[str, Any] = build(
            input_batch,
            cudagraph_mode,
            block_tables,
            slot_mappings,
            *of_model,
            for_capture=for_capture,
            ubatch_idx=ubatch_idx,
        )

        def build_part(index: int, part: UBatchSlice) -> dict[str, Any]:
            tables = tuple(table[part.request_slice] for table in block_tables)
            built: dict[str, Any] = build(
                _part_of(input_batch, part),
                CUDAGraphMode.NONE,
                tables,
                slot_mappings[:, part.token_slice],
                *of_model,
                ubatch_idx=index,
            )
            return built

        self.newest_metadata = metadata
        self.as_run = self.plans.as_run(
            metadata, input_batch, cudagraph_mode, for_capture, build_part
        )
        return metadata


class NPUEncoderRunner(EncoderRunner):
    """vLLM's encoder runner, without waits of the host for the device."""

    places: EncoderPlaces
    _around: Callable[[], AbstractContextManager[Any]]

    @classmethod
    def taking_over(cls, runner: EncoderRunner) -> None:
        """Converts the object to this class."""
        runner.__class__ = cls
        assert isinstance(runner, cls)
        runner.places = EncoderPlaces(runner.model, runner.device)
        runner._around = host_values(runner.model, runner.device)

    def execute_mm_encoder(self, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        with self._around():
            outputs: list[torch.Tensor] = super().execute_mm_encoder(*args, **kwargs)
        return outputs

    def gather_mm_embeddings(
        self, *args: Any, **kwargs: Any
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The encoder's outputs [tokens, hidden_size] of the step, and the tokens they belong to:
        int64 indices on the device, or vLLM's mask [tokens]."""
        embeddings, mask = super().gather_mm_embeddings(*args, **kwargs)
        return embeddings, self.places.of_step(embeddings, mask)


def _part_of(batch: InputBatch, part: UBatchSlice) -> InputBatch:
    """vLLM's batch of a ubatch, with its own memory for lengths."""
    ends, lengths = (torch.empty_like(each) for each in (batch.query_start_loc, batch.seq_lens))
    sliced: InputBatch = _slice_input_batch(batch, part, ends, lengths)
    return sliced
