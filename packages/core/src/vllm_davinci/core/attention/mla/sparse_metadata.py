"""Inputs of one step's sparse MLA: lengths on the device, prefills and decodes alike."""

from dataclasses import dataclass

import torch
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    CommonAttentionMetadata,
)

from vllm_davinci.core.attention.builder import MetadataBuilderBase
from vllm_davinci.core.attention.mla.step_rope import StepRope
from vllm_davinci.core.graph.host_lengths import HostLengths


@dataclass
class SparseMLAMetadata(StepRope, AttentionMetadata):
    """Sparse MLA's inputs of one step and one KV cache group, all on the device.

    num_actual_tokens: real rows of the step, or all rows of a graph; later rows are padding
    query_ends:        [num_reqs], int32: one past the last row of each request
    seq_lens:          [num_reqs], int32: tokens of each request up to this step's last
    block_table:       [num_reqs, max_blocks], int32
    slot_mapping:      [num_actual_tokens], int64; negative ones are padding
    chosen:            tokens chosen by the last indexer; layers without an indexer reuse them
    host_lengths:      set while a graph is captured; no launch here uses lengths from the host
    prefill:           None: no request's keys and values are expanded
    """

    num_actual_tokens: int
    query_ends: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    chosen: torch.Tensor | None = None
    host_lengths: HostLengths | None = None
    prefill: None = None
    _rows_of_slots: torch.Tensor | None = None
    _requests: torch.Tensor | None = None

    @property
    def rows_of_slots(self) -> torch.Tensor:
        """Rows of the step's tokens in the index cache, [num_actual_tokens, 1], int64.

        Padding is written to the first row of the null block, which belongs to no request.
        """
        if self._rows_of_slots is None:
            self._rows_of_slots = self.slot_mapping.clamp(min=0).unsqueeze(1)
        return self._rows_of_slots

    def rows_of_positions(
        self, positions: torch.Tensor, block_size: int, tokens: slice
    ) -> torch.Tensor:
        """Rows in the cache of positions in the tokens' requests: int64, like positions.

        positions: [tokens, n], int32; a negative one gives the token's own row, which is finite
        """
        if self._requests is None:
            places = torch.arange(self.num_actual_tokens, device=self.query_ends.device)
            before = places.unsqueeze(1) >= self.query_ends
            self._requests = before.sum(dim=1).clamp_(max=len(self.query_ends) - 1)
        known, table = positions.clamp(min=0).long(), self.block_table
        blocks = known // block_size + self._requests[tokens].unsqueeze(1) * table.shape[1]
        rows = table.flatten().index_select(0, blocks.flatten()).view_as(known).long()
        rows = rows * block_size + known % block_size
        return torch.where(positions < 0, self.rows_of_slots[tokens], rows)

    @property
    def is_decode_everywhere(self) -> bool:
        """Always False: lengths are on the device, so the host does not know."""
        return False

    def step_lengths(self) -> tuple[list[int], list[int]]:
        return [], []


class SparseMLAMetadataBuilder(MetadataBuilderBase[SparseMLAMetadata]):
    """Uses vLLM's tensors as they are. Never reads from the device."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def prepare(self) -> None:
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> SparseMLAMetadata:
        common, num_reqs = common_attn_metadata, common_attn_metadata.num_reqs
        return SparseMLAMetadata(
            num_actual_tokens=common.num_actual_tokens,
            query_ends=common.query_start_loc[1 : num_reqs + 1],
            seq_lens=common.seq_lens[:num_reqs],
            block_table=common.block_table_tensor[:num_reqs],
            slot_mapping=common.slot_mapping[: common.num_actual_tokens],
        )
