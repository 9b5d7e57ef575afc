"""Inputs of one step's attention, built once per step from lengths on the host."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec, CrossAttentionSpec

from vllm_davinci.core.attention.builder import MetadataBuilderBase
from vllm_davinci.core.attention.composed_plan import ComposedPlan
from vllm_davinci.core.attention.spans import BidirectionalSpans, whole_prompts
from vllm_davinci.core.attention.stripes import stripes_of
from vllm_davinci.core.errors import RELEASE, UnsupportedFeatureError
from vllm_davinci.core.graph.host_lengths import HostLengths


@dataclass
class NPUAttentionMetadata(AttentionMetadata):
    """Attention inputs of one step and one KV cache group.

    num_actual_tokens:    rows of query, key and value that are real; later rows are padding.
    actual_seq_lengths_q: per request, the end of its rows: cumulative query lengths. Host list.
    seq_lens:             per request, all tokens up to and including this step's. Host list.
    block_table:          [num_reqs, max_blocks], int32, on the device.
    slot_mapping:         [num_tokens], int64 on the device; block * block_size + offset, or -1.
    causal:               False when every token of a request may see every other one.
    host_lengths:         records the attention's launches while a graph is captured; else None.
    spans:                tokens of images with bidirectional attention; None without any.
    is_cross:             the keys are an encoder's: seq_lens counts its tokens, and slot_mapping
                          has slots for the tokens that it adds in this step (none in most steps).
    has_earlier:          under decode context parallelism, in steps with prefills: True if a
                          request has tokens of earlier steps. None otherwise.

    Under decode context parallelism seq_lens counts this rank's tokens: all of them in a decode
    step, only tokens of earlier steps in other steps.
    """

    num_actual_tokens: int
    actual_seq_lengths_q: list[int]
    seq_lens: list[int]
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool = True
    host_lengths: HostLengths | None = None
    spans: BidirectionalSpans | None = None
    is_cross: bool = False
    has_earlier: bool | None = None

    @cached_property
    def composed_plan(self) -> ComposedPlan:
        """This step's lengths for composed attention."""
        return ComposedPlan(*self.step_lengths(), self.block_table.device)

    def step_lengths(self) -> tuple[list[int], list[int]]:
        """Cumulative query lengths and total tokens, both per request."""
        return self.actual_seq_lengths_q, self.seq_lens

    def of_decodes(self, requests: slice, tokens: slice) -> "NPUAttentionMetadata":
        """Metadata of some whole requests of a decode step. tokens: their rows in the step"""
        return NPUAttentionMetadata(
            num_actual_tokens=tokens.stop - tokens.start,
            actual_seq_lengths_q=[
                end - tokens.start for end in self.actual_seq_lengths_q[requests]
            ],
            seq_lens=self.seq_lens[requests],
            block_table=self.block_table[requests],
            slot_mapping=self.slot_mapping[tokens],
            causal=self.causal,
        )


def host_seq_lens(common: CommonAttentionMetadata) -> list[int]:
    """Total tokens of each request, on the host. Raises UnsupportedFeatureError if unknown."""
    if common.seq_lens_cpu_upper_bound is None:
        raise UnsupportedFeatureError(
            "--no-async-scheduling is needed: the batch carries no sequence lengths on the host, "
            "which the fused attention operator needs. This happens with speculative decoding "
            "under asynchronous scheduling. Start with --no-async-scheduling."
        )
    lengths: list[int] = common.seq_lens_cpu_upper_bound[: common.num_reqs].tolist()
    return lengths


def padded_lengths(
    ends: list[int], seq_lens: list[int], num_tokens: int
) -> tuple[list[int], list[int]]:
    """Pads a step's lengths to a graph's size with padding requests.

    ends:       cumulative query lengths; padding requests repeat the last real one
    seq_lens:   total tokens of each request
    num_tokens: rows of the step; padding requests share the rows after the last real one equally
    Returns both, with padding requests that have as many tokens as queries: they read the first
    tokens of the null block, and their slots (-1) are never written.
    """
    num_padding = num_tokens - (ends[-1] if ends else 0)
    if not num_padding:
        return ends, seq_lens
    num_real = ends.index(ends[-1]) + 1 if ends[-1] else 0
    query_len = num_padding // (len(ends) - num_real)
    padding = range(query_len, num_padding + 1, query_len)
    real_end = num_tokens - num_padding
    return (
        [*ends[:num_real], *(real_end + end for end in padding)],
        [*seq_lens[:num_real], *(query_len for _ in padding)],
    )


class NPUAttentionMetadataBuilder(MetadataBuilderBase[NPUAttentionMetadata]):
    """Turns vLLM's batch description into host length lists. Never reads from the device.

    prompt_lens: lengths of the batch's prompts, for models in which a whole prompt (with an image,
                 or each one) attends to itself bidirectionally; None for other models
    """

    prompt_lens: Callable[[], Sequence[int]] | None = None
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def prepare(self) -> None:
        self._stripes = stripes_of(self.vllm_config)

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec
    ) -> AttentionCGSupport:
        """Refuses graphs for composed attention, whose shapes depend on lengths."""
        layers = vllm_config.compilation_config.static_forward_context.values()
        if any(getattr(getattr(layer, "impl", None), "composed", None) for layer in layers):
            return AttentionCGSupport.NEVER
        return cls._cudagraph_support

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> NPUAttentionMetadata:
        common = common_attn_metadata
        num_reqs = common.num_reqs
        causal = common.causal
        if not isinstance(causal, bool):
            raise UnsupportedFeatureError(
                "This model mixes causal and bidirectional requests in one batch, which "
                f"{RELEASE} cannot compute."
            )
        ends, seq_lens = padded_lengths(
            common.query_start_loc_cpu[1 : num_reqs + 1].tolist(),
            host_seq_lens(common),
            common.num_actual_tokens,
        )
        has_earlier = None
        if self._stripes is not None:
            if common.max_query_len > 1:
                earlier = np.subtract(seq_lens, np.diff(ends, prepend=0))
                has_earlier, seq_lens = bool(earlier.any()), earlier.tolist()
            seq_lens = self._stripes.lengths(seq_lens)
        block_table = common.block_table_tensor[:num_reqs]
        ranges = common.mm_req_doc_ranges
        if self.prompt_lens is not None and not causal:
            # vLLM marks HRM-Text's layers bidirectional. Only the prompt is: tokens that a
            # preempted request recomputes are causal.
            causal, lens = True, self.prompt_lens() if common.max_query_len > 1 else ()
            ranges = whole_prompts(range(len(lens)), lens)
        elif ranges and self.prompt_lens is not None:
            having = [request for request, images in ranges.items() if images]
            ranges = whole_prompts(having, self.prompt_lens())
        return NPUAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            actual_seq_lengths_q=ends,
            seq_lens=seq_lens,
            block_table=block_table,
            slot_mapping=common.slot_mapping[: common.num_actual_tokens],
            causal=causal,
            has_earlier=has_earlier,
            spans=BidirectionalSpans.of_step(ranges, ends, seq_lens, block_table)
            if ranges
            else None,
            is_cross=isinstance(self.kv_cache_spec, CrossAttentionSpec),
        )

    def update_block_table(
        self,
        metadata: NPUAttentionMetadata,
        blk_table: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> NPUAttentionMetadata:
        return NPUAttentionMetadata(
            num_actual_tokens=metadata.num_actual_tokens,
            actual_seq_lengths_q=metadata.actual_seq_lengths_q,
            seq_lens=metadata.seq_lens,
            block_table=blk_table[: len(metadata.seq_lens)],
            slot_mapping=slot_mapping[: metadata.num_actual_tokens],
            causal=metadata.causal,
            is_cross=metadata.is_cross,
            has_earlier=metadata.has_earlier,
            spans=None if metadata.spans is None else metadata.spans.over(blk_table),
        )
