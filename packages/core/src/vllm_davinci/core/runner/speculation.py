"""Drafters of the V2 runner, whose passes get their lengths from the host."""

from typing import Any

import numpy as np
import torch
from vllm.config import ModelConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator, DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import (
    SpeculatorCudaGraphManager,
)
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import (
    TargetDependentARSpeculator,
)

from vllm_davinci.core.inputs.copied_event import CopiedEvent
from vllm_davinci.core.runner.adoption import behind
from vllm_davinci.core.runner.graphs import NPUDraftGraphManager
from vllm_davinci.core.runner.host_drafts import drafting_on_host
from vllm_davinci.core.runner.plain_steps import NPURequestState


class ComputedTokens:
    """Corrects the host's counts of computed tokens once the device knows the accepted drafts.

    vLLM's scheduler assumes that all drafts of a step are accepted until it has seen that step's
    tokens, after the next step has begun. Lengths and slots are computed on the host here.
    """

    def __init__(self, states: NPURequestState) -> None:
        self._states = states
        self._copied: torch.Tensor | None = None
        self._is_copied = CopiedEvent()

    def copy(self) -> None:
        """Starts to copy the device's counts, after the newest step has changed them."""
        numbers = self._states.num_computed_tokens.gpu
        self._copied = numbers.to("cpu", non_blocking=True)
        self._is_copied.record()
        self._states.is_new[:] = False

    def of(self, slots: np.ndarray) -> np.ndarray:
        """Waits for the counts of these requests of the newest step: [num_reqs] int32."""
        assert self._copied is not None
        self._is_copied.synchronize()
        numbers: np.ndarray = self._copied.numpy()[slots]
        return numbers

    def settle(self, slots: np.ndarray) -> None:
        """Corrects the host's counts of a new step's requests."""
        if self._copied is not None:
            known = slots[~self._states.is_new[slots]]
            self._states.num_computed_tokens_np[known] = self.of(known)


class NPUDrafter(DraftModelSpeculator):
    """A drafter model. Its passes get the corrected lengths.

    The first pass has the rows of the target's step, whichever drafts were accepted. Later passes
    need the number of accepted drafts, which the host learns while the device runs the first one.
    """

    computed: ComputedTokens
    _slots: np.ndarray | None = None  # requests of the pass; None in a dummy step

    def propose(
        self, input_batch: InputBatch, *args: Any, dummy_run: bool = False, **kwargs: Any
    ) -> torch.Tensor:
        self._slots = None if dummy_run else input_batch.idx_mapping_np
        drafts: torch.Tensor = super().propose(input_batch, *args, dummy_run=dummy_run, **kwargs)
        return drafts

    @property
    def graph_managers(self) -> list[NPUDraftGraphManager]:
        """One manager per kind of pass that may have graphs: a step's first pass, later passes."""
        return []

    def _build_attn_metadata(
        self,
        num_reqs: int,
        batch_desc: BatchExecutionDescriptor,
        query_start_loc_np: np.ndarray,
        seq_lens_cpu_upper_bound: torch.Tensor,
        step: int,
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, Any] | None:
        lengths = seq_lens_cpu_upper_bound
        if step == 0:  # of a draft model, which reads the newest token with the target's rows
            lengths = lengths + 1
        elif self._slots is not None:
            lengths = torch.from_numpy(self.computed.of(self._slots))
        metadata: dict[str, Any] | None = super()._build_attn_metadata(
            num_reqs, batch_desc, query_start_loc_np, lengths, step, *args, **kwargs
        )
        self.model_state.newest_metadata = metadata
        return metadata


class NPUDependentDrafter(NPUDrafter, TargetDependentARSpeculator):
    """EAGLE, EAGLE-3 and MTP, whose first pass reads the target's hidden states."""

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        super().init_cudagraph_manager(cudagraph_mode)
        for name in ("prefill_cudagraph_manager", "decode_cudagraph_manager"):
            manager = NPUDraftGraphManager.taking_over(getattr(self, name), self.model_state)
            setattr(self, name, manager)

    @property
    def graph_managers(self) -> list[NPUDraftGraphManager]:
        managers = [self.prefill_cudagraph_manager, self.decode_cudagraph_manager]
        return managers[: 1 if self.num_speculative_steps == 1 else 2]


class NPUDraftModel(NPUDrafter, StandaloneARSpeculator):
    """A smaller model with its own cache. vLLM has no graphs of it; later passes get ours."""

    _manager: NPUDraftGraphManager
    _hidden_states: torch.Tensor  # [most requests, hidden_size], of the newest replay
    _replayed: BatchExecutionDescriptor | None = None  # set by the pass being prepared

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        is_full = cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
        mode = CUDAGraphMode.FULL_DECODE_ONLY if is_full else CUDAGraphMode.NONE
        manager = SpeculatorCudaGraphManager(self.vllm_config, self.device, mode, 1)
        self._manager = NPUDraftGraphManager.taking_over(manager, self.model_state)
        self._hidden_states = torch.zeros(
            self.max_num_reqs, self.hidden_size, dtype=self.dtype, device=self.device
        )

    @property
    def graph_managers(self) -> list[NPUDraftGraphManager]:
        return [] if self.num_speculative_steps == 1 else [self._manager]

    def capture(self) -> None:
        self._manager.capture(
            self._captured_pass,
            self.model_state,
            self.input_buffers,
            self.block_tables,
            self.attn_groups,
            self.kv_cache_config,
        )

    def _captured_pass(
        self,
        num_reqs: int,
        num_tokens: int,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        num_tokens_across_dp: torch.Tensor | None,
        *_: Any,
        **__: Any,
    ) -> None:
        buffers = self.input_buffers
        hidden_states = self._run_model(
            buffers.input_ids[:num_tokens],
            buffers.positions[:num_tokens],
            attn_metadata,
            slot_mappings,
            num_tokens_across_dp,
        )
        self._hidden_states[:num_tokens].copy_(hidden_states)

    def _build_uniform_attn_metadata(
        self, batch_desc: BatchExecutionDescriptor, num_reqs: int, *args: Any, **kwargs: Any
    ) -> dict[str, Any] | None:
        found = self._manager.dispatch(num_reqs, num_reqs, 1, num_active_loras=0)
        if found.cg_mode == CUDAGraphMode.FULL:
            self._replayed = batch_desc = found
            self.block_tables.slot_mappings[:, num_reqs : found.num_tokens].fill_(PAD_SLOT_ID)
        built: dict[str, Any] | None = super()._build_uniform_attn_metadata(
            batch_desc, num_reqs, *args, **kwargs
        )
        return built

    def _run_model(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        replayed, self._replayed = self._replayed, None
        if replayed is None:
            hidden_states: torch.Tensor = super()._run_model(input_ids, *args, **kwargs)
            return hidden_states
        self._manager.run_fullgraph(replayed)
        return self._hidden_states[: input_ids.shape[0]]


def name_auxiliary_layers(drafter: ModelConfig) -> None:
    """Copies the layers that EAGLE-3 reads to where vLLM's V2 runner expects them.

    Some checkpoints have them in `eagle_config`, which only vLLM's V1 runner reads.
    """
    key, config = "eagle_aux_hidden_state_layer_ids", drafter.hf_config
    layers = (getattr(config, "eagle_config", None) or {}).get(key)
    if layers and not getattr(config, key, None):
        setattr(config, key, layers)


def on_npu(speculator: BaseSpeculator, computed: ComputedTokens) -> BaseSpeculator:
    """Converts a drafter model to a class with our base first, then vLLM's.

    A drafter of n-grams stays, or gives its place to one on the host.
    """
    if isinstance(speculator, TargetDependentARSpeculator):
        speculator.__class__ = behind(NPUDependentDrafter, type(speculator))
    elif isinstance(speculator, StandaloneARSpeculator):
        speculator.__class__ = behind(NPUDraftModel, type(speculator))
    if isinstance(speculator, NPUDrafter):
        speculator.computed = computed
    return drafting_on_host(speculator)
