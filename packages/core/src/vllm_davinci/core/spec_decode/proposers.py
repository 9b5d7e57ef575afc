"""vLLM's drafters that run a model, with the lengths on the host that our attention takes."""

from collections.abc import Callable
from typing import Any, Self

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

# Tokens of each request in this step, [num_requests] on the device -> the same on the host.
HostCounts = Callable[[torch.Tensor], list[int]]


class _HostLengths(SpecDecodeBaseProposer):
    """Counts on the host which tokens a request has, from the second draft pass on.

    The first pass takes the rows of all drafts, whether they were kept or not, and vLLM then
    corrects the lengths on the device alone. The host learns how many were kept while the device
    runs that pass.
    """

    _host_counts: HostCounts
    _verified: tuple[torch.Tensor, list[int]] | None = None

    @classmethod
    def taking_over(cls, drafter: SpecDecodeBaseProposer, host_counts: HostCounts) -> Self:
        """The same drafter under this class."""
        ours = cls.__new__(cls)
        ours.__dict__.update(vars(drafter))
        ours._host_counts = host_counts
        return ours

    def prepare_next_token_ids_padded(
        self, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # A device that is behind may still copy from the memory of the step before.
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
        # The runner's own must stay as it is.
        common.seq_lens_cpu_upper_bound = common.seq_lens_cpu_upper_bound.clone()
        self._verified = valid_sampled_tokens_count, spec_decode_metadata.num_draft_tokens
        return common, *places

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
        moved: torch.Tensor = super()._update_positions_dependent_metadata(
            positions, common_attn_metadata, batch_size, input_batch_size, block_size
        )
        return moved


class NPUEagleProposer(_HostLengths, EagleProposer):
    """EAGLE, EAGLE-3 and MTP."""


class NPUDraftModelProposer(_HostLengths, DraftModelProposer):
    """A smaller model with its own cache."""

    def set_inputs_first_pass(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's, with the new tokens in the lengths of the host, which it leaves out."""
        num_tokens, places, common = super().set_inputs_first_pass(*args, **kwargs)
        common.seq_lens_cpu_upper_bound = (
            common.seq_lens_cpu_upper_bound + self.net_num_new_slots_per_request
        )
        return num_tokens, places, common


OWN = {EagleProposer: NPUEagleProposer, DraftModelProposer: NPUDraftModelProposer}


def on_npu(drafter: Any, host_counts: HostCounts) -> Any:
    """The drafter as our class, where there is one for its own."""
    ours = OWN.get(type(drafter))
    return drafter if ours is None else ours.taking_over(drafter, host_counts)
