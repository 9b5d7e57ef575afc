"""vLLM's drafter models, with lengths on the host and graphs of their passes."""

from collections.abc import Callable
from typing import Any, Self

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_davinci.core.spec_decode.draft_passes import DraftPass, DraftPasses

# Tokens of each request in this step, [num_requests] on the device -> the same on the host.
HostCounts = Callable[[torch.Tensor], list[int]]


class _HostLengths(SpecDecodeBaseProposer):
    """Counts each request's tokens on the host, from the second draft pass on.

    The first pass has rows for all drafts, accepted or not; vLLM then corrects the lengths only on
    the device. The host learns the number of accepted drafts while the device runs that pass.
    """

    _host_counts: HostCounts
    _verified: tuple[torch.Tensor, list[int]] | None = None

    @classmethod
    def taking_over(cls, drafter: SpecDecodeBaseProposer, host_counts: HostCounts) -> Self:
        """Converts the drafter to this class, in place."""
        ours = cls.__new__(cls)
        ours.__dict__.update(vars(drafter))
        ours._host_counts = host_counts
        return ours

    def prepare_next_token_ids_padded(
        self, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # A slow device may still copy from the previous step's memory.
        known = self.backup_next_token_ids
        known.cpu = torch.empty_like(known.cpu, pin_memory=True)
        known.np = known.cpu.numpy()
        prepared: tuple[torch.Tensor, torch.Tensor] = super().prepare_next_token_ids_padded(
            *args, **kwargs
        )
        return prepared

    def prepare_inputs_padded(
        self,
        common_attn_metadata: CommonAttentionMetadata,
        spec_decode_metadata: SpecDecodeMetadata,
        valid_sampled_tokens_count: torch.Tensor,
    ) -> tuple[CommonAttentionMetadata, torch.Tensor, torch.Tensor]:
        common, *places = super().prepare_inputs_padded(
            common_attn_metadata, spec_decode_metadata, valid_sampled_tokens_count
        )
        # The runner's own must not change.
        common.seq_lens_cpu_upper_bound = common.seq_lens_cpu_upper_bound.clone()
        self._verified = valid_sampled_tokens_count, spec_decode_metadata.num_draft_tokens
        return common, *places

    @property
    def _slots_per_token(self) -> int:
        """Slots of a block per token: more than 1 if the block is a shared page."""
        (group, *_) = self.draft_attn_groups
        if not group.kernel_block_stride or group.kernel_block_size is None:
            return 1
        slots: int = group.kernel_block_stride * group.kernel_block_size
        return slots // group.kv_cache_spec.block_size

    def _update_positions_dependent_metadata(
        self,
        positions: torch.Tensor,
        common_attn_metadata: Any,
        batch_size: int,
        input_batch_size: int,
        block_size: int,
    ) -> torch.Tensor:
        if self._verified is not None:
            counts, num_drafts = self._verified
            self._verified = None
            pairs = zip(num_drafts, self._host_counts(counts), strict=True)
            rejected = [drafts + 1 - count if drafts else 0 for drafts, count in pairs]
            common_attn_metadata.seq_lens_cpu_upper_bound -= torch.tensor(
                rejected, dtype=torch.int32
            )
        table = common_attn_metadata.block_table_tensor
        if self._slots_per_token > 1:  # a block's slots begin at a multiple of its total number
            common_attn_metadata.block_table_tensor = table * self._slots_per_token
        moved: torch.Tensor = super()._update_positions_dependent_metadata(
            positions, common_attn_metadata, batch_size, input_batch_size, block_size
        )
        common_attn_metadata.block_table_tensor = table
        return moved


class _CapturedPasses(SpecDecodeBaseProposer):
    """Replays a graph for each pass of a decode step.

    vLLM's drafters support only piecewise graphs, which need a compiled model. Without captured
    passes, and for prefills, they run eagerly.
    """

    passes: DraftPasses | None = None
    _is_proposing = False
    _has_first_pass = False  # of the step being drafted for

    def propose(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._is_proposing, self._has_first_pass = True, False
        try:
            drafts: torch.Tensor = super().propose(*args, **kwargs)
        finally:
            self._is_proposing = False
            if self.passes is not None:
                self.passes.planned = None
        return drafts

    def build_per_group_and_layer_attn_metadata(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int = 0
    ) -> tuple[list[object], dict[str, object]]:
        common, passes = common_attn_metadata, self.passes
        if passes is not None and self._is_proposing:
            if draft_index == 0:
                passes.planned = passes.plan_first(common)
            if passes.planned is not None:
                common = passes.metadata(passes.planned, common, self._slot_mapping_buffer)
        built: tuple[list[object], dict[str, object]] = (
            super().build_per_group_and_layer_attn_metadata(common, draft_index)
        )
        return built

    def _determine_batch_execution_and_padding(
        self, num_tokens: int, use_cudagraphs: bool = True
    ) -> tuple[CUDAGraphMode, int, torch.Tensor | None]:
        """Row counts: of the first pass, whose metadata has been built, then of the others."""
        passes = self.passes
        if passes is not None and self._is_proposing:
            if self._has_first_pass:
                passes.planned = passes.plan_next(num_tokens)
            self._has_first_pass = True
            if passes.planned is not None:
                return CUDAGraphMode.FULL, passes.planned.num_tokens, None
        determined: tuple[CUDAGraphMode, int, torch.Tensor | None] = (
            super()._determine_batch_execution_and_padding(num_tokens, use_cudagraphs)
        )
        return determined

    @torch.inference_mode()
    def run_dummy_pass(self, planned: DraftPass, mode: CUDAGraphMode) -> None:
        """Runs, captures or replays a pass without requests."""
        assert self.passes is not None
        count = planned.num_tokens
        self._slot_mapping_buffer[:count].fill_(-1)
        _, metadata = super().build_per_group_and_layer_attn_metadata(
            self.passes.dummy_metadata(planned, self._slot_mapping_buffer)
        )
        inputs, _ = self.build_model_inputs_first_pass(count, count, None)
        self.passes.planned = planned
        try:
            with set_forward_context(
                metadata,
                self.vllm_config,
                num_tokens=count,
                cudagraph_runtime_mode=mode,
                slot_mapping=self._get_slot_mapping(count),
            ):
                self.model(**inputs)
        finally:
            self.passes.planned = None


class NPUEagleProposer(_HostLengths, _CapturedPasses, EagleProposer):
    """EAGLE, EAGLE-3 and MTP."""


class NPUDraftModelProposer(_HostLengths, _CapturedPasses, DraftModelProposer):
    """A smaller model with its own cache."""

    def set_inputs_first_pass(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's method, which also adds the new tokens to the lengths on the host."""
        num_tokens, places, common = super().set_inputs_first_pass(*args, **kwargs)
        common.seq_lens_cpu_upper_bound = (
            common.seq_lens_cpu_upper_bound + self.net_num_new_slots_per_request
        )
        return num_tokens, places, common


OWN = {EagleProposer: NPUEagleProposer, DraftModelProposer: NPUDraftModelProposer}


def on_npu(drafter: Any, host_counts: HostCounts) -> Any:
    """The drafter converted to our class for it; unchanged if there is none."""
    ours = OWN.get(type(drafter))
    return drafter if ours is None else ours.taking_over(drafter, host_counts)
