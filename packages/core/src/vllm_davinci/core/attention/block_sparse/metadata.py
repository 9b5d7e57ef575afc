"""Inputs of one step's block-sparse attention; each key head of a request is one request."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from vllm.v1.attention.backend import (
    AttentionImplBase,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from vllm_davinci.core.attention.backend import NPUAttentionBackend
from vllm_davinci.core.attention.block_sparse.choice import BlockRule
from vllm_davinci.core.attention.composed_plan import KEYS, SCORES, ComposedPlan, Piece
from vllm_davinci.core.attention.metadata import (
    NPUAttentionMetadata,
    NPUAttentionMetadataBuilder,
)
from vllm_davinci.core.device.soc import BLOCK_SIZE_TOKENS

# Most requests per call of the attention operator. Source: aclnnFusedInferAttentionScoreV3.md,
# constraints of actualSeqLengths.
REQUESTS = 4096


@dataclass(kw_only=True)
class BlockSparseMetadata(NPUAttentionMetadata):
    """See NPUAttentionMetadata and CapturableMetadata. num_kv_heads: of this rank"""

    num_kv_heads: int
    rule: BlockRule
    width: int | None = None

    @cached_property
    def widths(self) -> tuple[int, ...]:
        return self.rule.graph_widths(self.block_table.shape[1])

    @cached_property
    def num_blocks(self) -> int:
        """Blocks of the longest request."""
        return -(-max(self.seq_lens, default=0) // BLOCK_SIZE_TOKENS)

    @property
    def sees_all(self) -> bool:
        """True if no request has more blocks than a query may choose."""
        num_blocks = self.num_blocks if self.width is None else self.width
        return num_blocks <= self.rule.num_chosen

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
        num = self.num_kv_heads
        tables = self.block_table * num + self._heads.to(torch.int32).view(-1, 1, 1)
        return NPUAttentionMetadata(
            num_actual_tokens=self.num_actual_tokens * num,
            actual_seq_lengths_q=self._ends_of_heads,
            seq_lens=self.seq_lens * num,
            block_table=tables.flatten(0, 1),
            slot_mapping=self.slots_of_heads,
            host_lengths=self.host_lengths,
        )

    def of_chosen(self, pages: torch.Tensor) -> list[NPUAttentionMetadata]:
        """Attention to chosen blocks, divided into calls: a request per token and key head.

        pages: [num_tokens, num_kv_heads, num_chosen], int32
        """
        tables = (pages * self.num_kv_heads + self._heads.to(torch.int32).view(1, -1, 1)).flatten(
            0, 1
        )
        lengths = self._lengths_of_chosen
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
        assert self.width is not None
        in_requests = positions.view(len(self.block_table), -1)
        (num_requests, query_len), lengths = in_requests.shape, in_requests[:, -1] + 1
        num_blocks = min(self.width, self.block_table.shape[1])
        scores = SCORES // (self.num_kv_heads * query_len), KEYS // self.rule.index_size
        at_once = max(1, min(scores) // (num_blocks * BLOCK_SIZE_TOKENS))
        pieces = []
        for start in range(0, num_requests, at_once):
            part = slice(start, min(start + at_once, num_requests))
            rows = slice(start * query_len, part.stop * query_len)
            pieces.append(Piece(rows, part, num_blocks, lengths[part], in_requests[part]))
        return pieces

    @cached_property
    def _pieces(self) -> list[Piece]:
        lengths = self.actual_seq_lengths_q, self.seq_lens
        plan = ComposedPlan(*lengths, self.block_table.device)
        return list(plan.pieces(self.num_kv_heads, self.rule.index_size))

    @cached_property
    def _heads(self) -> torch.Tensor:
        return torch.arange(self.num_kv_heads, device=self.block_table.device)

    def step_lengths(self) -> tuple[list[int], list[int]]:
        """Lengths of the operator's requests: per key head of each request, or per token."""
        if self.sees_all:
            return self._ends_of_heads, self.seq_lens * self.num_kv_heads
        return list(range(1, len(self._lengths_of_chosen) + 1)), self._lengths_of_chosen

    @cached_property
    def _ends_of_heads(self) -> list[int]:
        firsts = np.arange(self.num_kv_heads) * self.num_actual_tokens
        ends: list[int] = np.add.outer(firsts, self.actual_seq_lengths_q).ravel().tolist()
        return ends

    @cached_property
    def _lengths_of_chosen(self) -> list[int]:
        ends = np.asarray(self.actual_seq_lengths_q)
        firsts = np.asarray(self.seq_lens) - ends
        positions = np.arange(ends[-1]) + np.repeat(firsts, np.diff(ends, prepend=0))
        full = np.minimum(positions // BLOCK_SIZE_TOKENS, self.rule.num_chosen - 1)
        keys = full * BLOCK_SIZE_TOKENS + positions % BLOCK_SIZE_TOKENS + 1
        lengths: list[int] = np.repeat(keys, self.num_kv_heads).tolist()
        return lengths


class BlockSparseMetadataBuilder(NPUAttentionMetadataBuilder):
    """Adds the rule for choosing blocks, which all layers of a model share."""

    def prepare(self) -> None:
        super().prepare()
        layers = self.vllm_config.compilation_config.static_forward_context
        layer: Any = layers[self.layer_names[0]]
        self._choice = {"num_kv_heads": layer.num_kv_heads, "rule": layer.rule}

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
