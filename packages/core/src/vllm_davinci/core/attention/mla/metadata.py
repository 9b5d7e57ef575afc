"""The inputs of one step's MLA: decodes first, then prefills with their context.

Everything a step needs is here, not on the layers, so that two ubatches of a step can alternate,
each with its own metadata.
"""

from dataclasses import dataclass

import torch
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from vllm_davinci.core.attention.builder import MetadataBuilderBase
from vllm_davinci.core.attention.metadata import host_seq_lens, padded_lengths
from vllm_davinci.core.attention.mla.context import (
    CONTEXT_CHUNK_ROWS,
    ContextChunk,
    context_chunk,
    plan_context,
)
from vllm_davinci.core.attention.mla.step_rope import StepRope
from vllm_davinci.core.attention.mla.striped_context import striped_chunk
from vllm_davinci.core.attention.stripes import stripes_of
from vllm_davinci.core.device.soc import BLOCK_SIZE_TOKENS
from vllm_davinci.core.errors import RELEASE, ConfigurationError, UnsupportedFeatureError
from vllm_davinci.core.graph.host_lengths import HostLengths

# Queries per request that attention over the cache supports. Source: the documentation of
# npu_fused_infer_attention_score, constraints of query_rope with heads of 512.
MAX_DECODE_QUERY_LEN = 16


@dataclass
class MLADecodeMetadata:
    """Requests with few queries, which attend over the cache itself.

    actual_seq_lengths_q: cumulative query lengths. Host list.
    seq_lens:             tokens held by this rank, up to and including this step's.
                          Host list.
    block_table:          [num_decodes, max_blocks], int32, on the device.
    max_query_len:        longest query.
    """

    actual_seq_lengths_q: list[int]
    seq_lens: list[int]
    block_table: torch.Tensor
    max_query_len: int


@dataclass
class MLAPrefillMetadata:
    """Requests with many queries, for which keys and values are expanded per head.

    actual_seq_lengths_q: cumulative query lengths, from 0 at the first prefill. Host list.
    context:              cached tokens before the new ones, in chunks attended one after another.
    first_row:            first row of the prefills in the step.
    """

    actual_seq_lengths_q: list[int]
    context: list[ContextChunk]
    first_row: int = 0

    @property
    def rows(self) -> slice:
        """The prefills' rows in the step."""
        return slice(self.first_row, self.first_row + self.actual_seq_lengths_q[-1])


@dataclass
class GatheredRows(StepRope):
    """Rows of a step whose prefills are divided among ranks: all ranks' rows, padding included.

    slot_mapping: [ranks * rows], int64, on the device; a token's slot is in one row only.
    positions:    [ranks * rows], int64, on the device; gathered by the step's first layer.
    """

    slot_mapping: torch.Tensor
    positions: torch.Tensor | None = None


@dataclass
class NPUMLAMetadata(StepRope, AttentionMetadata):
    """MLA's inputs of one step and one KV cache group.

    num_actual_tokens: rows of the step that are real; later rows are padding.
    num_decode_tokens: rows of decode requests, which come first.
    slot_mapping:      [num_actual_tokens], int64, on the device.
    decode, prefill:   None if the step has no such requests.
    others_prefill:    whether another data-parallel rank has prefills in this step.
    host_lengths:      records the attention's launches while a graph is captured; else None.
    all_ranks:         rows of all ranks among which prefills are divided; else None.
    """

    num_actual_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    slot_mapping: torch.Tensor
    decode: MLADecodeMetadata | None
    prefill: MLAPrefillMetadata | None
    others_prefill: bool = False
    host_lengths: HostLengths | None = None
    all_ranks: GatheredRows | None = None

    def step_lengths(self) -> tuple[list[int], list[int]]:
        """Cumulative query lengths and total tokens, both per request of a decode step."""
        assert self.decode is not None and self.prefill is None
        return self.decode.actual_seq_lengths_q, self.decode.seq_lens

    def of_decodes(self, requests: slice, tokens: slice) -> "NPUMLAMetadata":
        """Metadata of some whole requests of a decode step. tokens: their rows in the step"""
        assert self.decode is not None and self.prefill is None
        num_tokens = tokens.stop - tokens.start
        ends = [end - tokens.start for end in self.decode.actual_seq_lengths_q[requests]]
        return NPUMLAMetadata(
            num_actual_tokens=num_tokens,
            num_decodes=len(ends),
            num_decode_tokens=num_tokens,
            num_prefills=0,
            slot_mapping=self.slot_mapping[tokens],
            decode=MLADecodeMetadata(
                actual_seq_lengths_q=ends,
                seq_lens=self.decode.seq_lens[requests],
                block_table=self.decode.block_table[requests],
                max_query_len=self.decode.max_query_len,
            ),
            prefill=None,
            others_prefill=self.others_prefill,
        )

    @property
    def is_decode_everywhere(self) -> bool:
        """True if this step only decodes, on every DP rank."""
        return self.decode is not None and self.prefill is None and not self.others_prefill


class NPUMLAMetadataBuilder(MetadataBuilderBase[NPUMLAMetadata]):
    """Turns vLLM's batch description into host length lists. Never reads from the device."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def prepare(self) -> None:
        self.context_chunk_rows = CONTEXT_CHUNK_ROWS
        self._stripes = stripes_of(self.vllm_config)
        self._divides_prefills = self.vllm_config.parallel_config.prefill_context_parallel_size > 1
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        threshold = self.reorder_batch_threshold or 1
        if threshold > MAX_DECODE_QUERY_LEN:
            raise ConfigurationError(
                f"num_speculative_tokens must be at most {MAX_DECODE_QUERY_LEN - 1}: MLA supports "
                f"{MAX_DECODE_QUERY_LEN} queries per request and decode step, and {threshold} are "
                "needed. Lower it."
            )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> NPUMLAMetadata:
        common = common_attn_metadata
        if common.causal is not True:
            raise UnsupportedFeatureError(
                "This model needs bidirectional MLA, which "
                f"{RELEASE} cannot compute. Choose another model."
            )
        num_decodes, num_prefills, num_decode_tokens, _ = split_decodes_and_prefills(
            common, decode_threshold=self.reorder_batch_threshold or 1
        )
        ends, seq_lens = padded_lengths(
            common.query_start_loc_cpu[1 : common.num_reqs + 1].tolist(),
            host_seq_lens(common),
            common.num_actual_tokens,
        )
        block_table = common.block_table_tensor[: common.num_reqs]
        kept = seq_lens[:num_decodes]
        if self._stripes is not None:
            kept = self._stripes.lengths(kept)
        return NPUMLAMetadata(
            num_actual_tokens=common.num_actual_tokens,
            num_decodes=num_decodes,
            num_decode_tokens=num_decode_tokens,
            num_prefills=num_prefills,
            slot_mapping=common.slot_mapping[: common.num_actual_tokens],
            decode=MLADecodeMetadata(
                actual_seq_lengths_q=ends[:num_decodes],
                seq_lens=kept,
                block_table=block_table[:num_decodes],
                max_query_len=max(_lengths(ends[:num_decodes])),
            )
            if num_decodes
            else None,
            prefill=self._prefill(
                num_decode_tokens,
                [end - num_decode_tokens for end in ends[num_decodes:]],
                seq_lens[num_decodes:],
                block_table[num_decodes:],
            )
            if num_prefills
            else None,
            all_ranks=GatheredRows(common.slot_mapping) if self._divides_prefills else None,
        )

    def _prefill(
        self,
        first_row: int,
        actual_seq_lengths_q: list[int],
        seq_lens: list[int],
        block_table: torch.Tensor,
    ) -> MLAPrefillMetadata:
        query_lens = _lengths(actual_seq_lengths_q)
        stripes = self._stripes
        plan = plan_context(
            [seq_len - length for seq_len, length in zip(seq_lens, query_lens, strict=True)],
            self.context_chunk_rows,
            BLOCK_SIZE_TOKENS * (1 if stripes is None else stripes.size),
        )
        context = [
            context_chunk(parts, query_lens, block_table)
            if stripes is None
            else striped_chunk(parts, query_lens, block_table, stripes)
            for parts in plan
        ]
        return MLAPrefillMetadata(actual_seq_lengths_q, context, first_row)


def _lengths(ends: list[int]) -> list[int]:
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]
