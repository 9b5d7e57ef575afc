"""Inputs of one step's block-sparse attention; each key head of a request is one request."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionImplBase,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_davinci.core.attention.backend import NPUAttentionBackend
from vllm_davinci.core.attention.block_sparse.choice import BlockRule
from vllm_davinci.core.attention.composed_plan import ComposedPlan, Piece
from vllm_davinci.core.attention.metadata import (
    NPUAttentionMetadata,
    NPUAttentionMetadataBuilder,
)
from vllm_davinci.core.device.soc import BLOCK_SIZE_TOKENS

# Most requests per call of the attention operator. Source: aclnnFusedInferAttentionScoreV3.md,
# constraints of actualSeqLengths.
REQUESTS = 4096
# Most bytes of index keys that a graph reads per layer: it reads whole block tables, whatever the
# requests' lengths.
GRAPH_BYTES = 2**26


@dataclass(kw_only=True)
class BlockSparseMetadata(NPUAttentionMetadata):
    """See NPUAttentionMetadata. num_kv_heads: of this rank"""

    num_kv_heads: int
    rule: BlockRule
    _lengths: tuple[list[int], list[int]] | None = None

    @property
    def sees_all(self) -> bool:
        """True if no request has more blocks than a query may choose. Always False in graphs."""
        most = self.rule.num_chosen * BLOCK_SIZE_TOKENS
        return self.host_lengths is None and max(self.seq_lens, default=0) <= most

    @cached_property
    def rows_of_slots(self) -> torch.Tensor:
        """Rows of the step's tokens in the index cache, [num_tokens, 1], int64.

        Padding is written to the first row of the null block, which belongs to no request.
        """
        return self.slot_mapping.clamp(min=0).unsqueeze(1)

    @cached_property
    def slots_of_heads(self) -> torch.Tensor:
        """Slots of each token's key heads, [num_tokens * num_kv_heads], int64; -1 for padding."""
        if self.num_kv_heads == 1:
            return self.slot_mapping
        slots = self.slot_mapping.unsqueeze(1)
        blocks = slots // BLOCK_SIZE_TOKENS * self.num_kv_heads + self._heads
        inside = blocks * BLOCK_SIZE_TOKENS + slots % BLOCK_SIZE_TOKENS
        return inside.masked_fill_(slots < 0, -1).flatten()

    @cached_property
    def of_heads(self) -> NPUAttentionMetadata:
        """Attention to all tokens: each request once per key head, ordered by key head."""
        num_tokens, num = self.num_actual_tokens, self.num_kv_heads
        ends = np.asarray(self.actual_seq_lengths_q)
        tables = self.block_table * num + self._heads.to(torch.int32).view(-1, 1, 1)
        return NPUAttentionMetadata(
            num_actual_tokens=num_tokens * num,
            actual_seq_lengths_q=np.add.outer(np.arange(num) * num_tokens, ends).ravel().tolist(),
            seq_lens=self.seq_lens * num,
            block_table=tables.flatten(0, 1),
            slot_mapping=self.slots_of_heads,
        )

    def of_chosen(self, pages: torch.Tensor) -> list[NPUAttentionMetadata]:
        """Attention to chosen blocks, divided into calls: a request per token and key head.

        pages: [num_tokens, num_kv_heads, num_chosen], int32
        """
        tables = (pages * self.num_kv_heads + self._heads.to(torch.int32).view(1, -1, 1)).flatten(
            0, 1
        )
        lengths = self.step_lengths()[1]
        at_once = REQUESTS if self.host_lengths is None else len(lengths)
        return [
            NPUAttentionMetadata(
                num_actual_tokens=len(of_call),
                actual_seq_lengths_q=list(range(1, len(of_call) + 1)),
                seq_lens=of_call,
                block_table=tables[start : start + at_once],
                slot_mapping=self.slots_of_heads[start : start + at_once],
                host_lengths=self.host_lengths,
            )
            for start in range(0, len(lengths), at_once)
            if (of_call := lengths[start : start + at_once])
        ]

    def pieces(self, positions: torch.Tensor) -> list[Piece]:
        """Chunks for `choose_blocks`. positions: [num_tokens], int64, read in graphs only"""
        if self.host_lengths is None:
            return self._pieces
        num_requests, num_blocks = self.block_table.shape
        in_requests = positions.view(num_requests, -1)
        lengths = in_requests[:, -1] + 1
        rows, requests = slice(0, len(positions)), slice(0, num_requests)
        return [Piece(rows, requests, num_blocks, lengths, in_requests)]

    @cached_property
    def _pieces(self) -> list[Piece]:
        lengths = self.actual_seq_lengths_q, self.seq_lens
        plan = ComposedPlan(*lengths, self.block_table.device)
        return list(plan.pieces(self.num_kv_heads, self.rule.index_size))

    @cached_property
    def _heads(self) -> torch.Tensor:
        return torch.arange(self.num_kv_heads, device=self.block_table.device)

    def step_lengths(self) -> tuple[list[int], list[int]]:
        """Lengths for `of_chosen`: cumulative queries, then keys, of each token and key head."""
        if self._lengths is None:
            ends = np.asarray(self.actual_seq_lengths_q)
            firsts = np.asarray(self.seq_lens) - ends
            positions = np.arange(ends[-1]) + np.repeat(firsts, np.diff(ends, prepend=0))
            full = np.minimum(positions // BLOCK_SIZE_TOKENS, self.rule.num_chosen - 1)
            keys = full * BLOCK_SIZE_TOKENS + positions % BLOCK_SIZE_TOKENS + 1
            lengths = np.repeat(keys, self.num_kv_heads).tolist()
            self._lengths = list(range(1, len(lengths) + 1)), lengths
        return self._lengths


class BlockSparseMetadataBuilder(NPUAttentionMetadataBuilder):
    """Adds the rule for choosing blocks, which all layers of a model share."""

    def prepare(self) -> None:
        super().prepare()
        layers = self.vllm_config.compilation_config.static_forward_context
        layer: Any = layers[self.layer_names[0]]
        self._choice = {"num_kv_heads": layer.num_kv_heads, "rule": layer.rule}

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec
    ) -> AttentionCGSupport:
        """Refuses graphs if block tables are too long, because a graph reads them whole."""
        requests = vllm_config.scheduler_config.max_num_seqs
        longest = vllm_config.model_config.max_model_len
        row = kv_cache_spec.head_size * kv_cache_spec.dtype.itemsize
        if requests * longest * row > GRAPH_BYTES:
            return AttentionCGSupport.NEVER
        return super().get_cudagraph_support(vllm_config, kv_cache_spec)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> BlockSparseMetadata:
        built = super().build(common_prefix_len, common_attn_metadata, fast_build)
        given = {each.name: getattr(built, each.name) for each in fields(NPUAttentionMetadata)}
        return BlockSparseMetadata(**given, **self._choice)


class BlockSparseBackend(NPUAttentionBackend):
    """Attention to chosen blocks; see `block_sparse.layer`."""

    masks_more: ClassVar[bool] = False

    @staticmethod
    def get_impl_cls() -> type[AttentionImplBase[Any]]:
        from vllm_davinci.core.attention.paged import NPUAttentionImpl  # torch_npu: worker only

        return NPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        return BlockSparseMetadataBuilder
