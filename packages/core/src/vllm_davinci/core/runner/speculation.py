"""Drafters of the V2 runner, whose passes get their lengths from the host."""

from typing import Any

import numpy as np
import torch
from vllm.config import ModelConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator
from vllm.v1.worker.gpu.spec_decode.multi_module_mtp.speculator import MultiModuleMTPSpeculator
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
from vllm_davinci.core.triton_kernels.multi_module import write_hidden_states


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
        """Waits for the newest step's counts; returns those of `slots`: [num_reqs] int32."""
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
        lengths = self._lengths(seq_lens_cpu_upper_bound, step)
        metadata: dict[str, Any] | None = super()._build_attn_metadata(
            num_reqs, batch_desc, query_start_loc_np, lengths, step, *args, **kwargs
        )
        self.model_state.newest_metadata = metadata
        return metadata

    def _lengths(self, of_target: torch.Tensor, step: int) -> torch.Tensor:
        """Tokens of each request before pass `step`: [num_reqs] int32. of_target: of the target's
        step"""
        if step == 0:  # a draft model, which also reads the newest token
            return of_target + 1
        return of_target if self._slots is None else torch.from_numpy(self._computed())

    def _computed(self) -> np.ndarray:
        assert self._slots is not None
        return self.computed.of(self._slots)


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


class NPUModularDrafter(NPUDrafter, MultiModuleMTPSpeculator):
    """MTP with several modules, each of which reads the target's rows, shifted by one token.

    All modules run in one pass. Its lengths need the number of rejected drafts, because its rows
    begin with rows of the previous step, one fewer than that number.
    """

    cudagraph_manager: Any
    _first_positions: np.ndarray  # [num_reqs], of the newest step

    @classmethod
    def keep_spare_row(cls, drafter: MultiModuleMTPSpeculator) -> None:
        """Gives cached inputs a last row that belongs to no request: see `multi_module`."""
        for name in ("cached_draft_input_ids", "cached_target_hidden_states"):
            table = getattr(drafter, name)
            setattr(drafter, name, torch.cat([table, torch.zeros_like(table[:1])]))

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        super().init_cudagraph_manager(cudagraph_mode)
        manager = NPUDraftGraphManager.taking_over(self.cudagraph_manager, self.model_state)
        self.cudagraph_manager = manager

    @property
    def graph_managers(self) -> list[NPUDraftGraphManager]:
        return [self.cudagraph_manager]

    def _prepare_inputs(
        self,
        target_hidden_states: torch.Tensor,
        input_batch: InputBatch,
        num_tokens: int,
        max_query_len: int,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """vLLM's method. For a request that is too short it reads rows before the request's first
        token, so hidden states of such requests are written again without these rows.
        """
        of_step = target_hidden_states, input_batch, num_tokens, max_query_len
        super()._prepare_inputs(*of_step, num_sampled, num_rejected, *args, **kwargs)
        first = self._first_positions = input_batch.num_computed_tokens_np
        if self._slots is not None and (first < self.num_speculative_steps - 1).any():
            write_hidden_states(
                self.hidden_states,
                target_hidden_states,
                self.cached_target_hidden_states,
                input_batch.idx_mapping,
                num_rejected,
                self.input_buffers.query_start_loc,
                input_batch.positions,
            )

    def _lengths(self, of_target: torch.Tensor, step: int) -> torch.Tensor:
        if self._slots is None:
            return of_target
        of_target = of_target[: len(self._slots)]
        num_rejected = of_target - torch.from_numpy(self._computed())
        again = (num_rejected - 1).clamp_(min=0)
        return of_target - torch.minimum(again, torch.from_numpy(self._first_positions))


class NPUDraftModel(NPUDrafter, StandaloneARSpeculator):
    """A smaller model with its own cache. vLLM has no graphs for it; its later passes get ours."""

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


class NPUBlockDrafter(NPUDrafter, DSparkSpeculator):
    """DSpark, which drafts a block of tokens after the accepted ones in one pass, without graphs.

    The host knows the pass's lengths once the target's step is verified.
    """

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        super().init_cudagraph_manager(CUDAGraphMode.NONE)

    def capture(self) -> None:
        pass


def name_auxiliary_layers(drafter: ModelConfig) -> None:
    """Copies the layers that EAGLE-3 reads to where vLLM's V2 runner expects them.

    Some checkpoints have them in `eagle_config`, which that runner does not read.
    """
    key, config = "eagle_aux_hidden_state_layer_ids", drafter.hf_config
    layers = (getattr(config, "eagle_config", None) or {}).get(key)
    if layers and not getattr(config, key, None):
        setattr(config, key, layers)


def on_npu(speculator: BaseSpeculator, computed: ComputedTokens) -> BaseSpeculator:
    """Converts a drafter model to a class with our base first, then vLLM's.

    vLLM's n-gram drafter stays, or is replaced by a drafter on the host.
    """
    if isinstance(speculator, TargetDependentARSpeculator):
        speculator.__class__ = behind(NPUDependentDrafter, type(speculator))
    elif isinstance(speculator, StandaloneARSpeculator):
        speculator.__class__ = behind(NPUDraftModel, type(speculator))
    elif isinstance(speculator, MultiModuleMTPSpeculator):
        NPUModularDrafter.keep_spare_row(speculator)
        speculator.__class__ = behind(NPUModularDrafter, type(speculator))
    elif isinstance(speculator, DSparkSpeculator):
        speculator.__class__ = behind(NPUBlockDrafter, type(speculator))
    if isinstance(speculator, NPUDrafter):
        speculator.computed = computed
    return drafting_on_host(speculator)
