"""A step's model state: attention metadata, recurrent states, embeddings."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.encoder_decoder import EncoderDecoderModelState
from vllm.v1.worker.gpu.model_states.encoder_only import EncoderOnlyModelState
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
from vllm.v1.worker.gpu.ubatch_utils import _slice_input_batch
from vllm.v1.worker.ubatch_utils import UBatchSlice
from vllm.v1.worker.utils import AttentionGroup

from vllm_davinci.core.multimodal.encoder_places import EncoderPlaces
from vllm_davinci.core.multimodal.host_values import host_values
from vllm_davinci.core.runner.adoption import behind
from vllm_davinci.core.runner.buffers import take_over_tables
from vllm_davinci.core.runner.prompt_embeds import NPUPromptEmbeds
from vllm_davinci.core.runner.rope_positions import NPURopeState
from vllm_davinci.core.runner.ubatches import StepPlans

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
