"""The inputs of one step's attention, built once per step from host copies of the lengths."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec, CrossAttentionSpec

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
    host_lengths:         takes the attention's launches while a graph is captured; else None.
    spans:                tokens of images that see each other both ways; None without any.
    is_cross:             keys are an encoder's: seq_lens are its tokens, and slot_mapping has the
                          slots of those that come with this step, none in most steps.
    has_earlier:          of a step that is not of decodes, under decode context parallelism:
                          whether any request has tokens of earlier steps. None else.

    Under decode context parallelism seq_lens counts this rank's tokens: in a step of decodes all of
    them, in other steps those of earlier steps.
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
        """Its lengths, as attention in torch's operators takes them."""
        return ComposedPlan(*self.step_lengths(), self.block_table.device)

    def step_lengths(self) -> tuple[list[int], list[int]]:
        """Cumulative query lengths, and all tokens, of each request."""
        return self.actual_seq_lengths_q, self.seq_lens

    def step_tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors of it that the device reads; of an encoder's keys, which no graph writes,
        without their slots."""
        return (self.block_table,) if self.is_cross else (self.block_table, self.slot_mapping)

    def of_decodes(self, requests: slice, tokens: slice) -> "NPUAttentionMetadata":
        """Metadata of some whole requests of a step of decodes. tokens: their rows of the step"""
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
    """All tokens of each request, from the host. Raises UnsupportedFeatureError without them."""
    if common.seq_lens_cpu_upper_bound is None:
        raise UnsupportedFeatureError(
            "The batch carries no sequence lengths on the host, which the fused attention "
            "operator needs. This happens with speculative decoding under asynchronous "
            "scheduling: start with --no-async-scheduling."
        )
    lengths: list[int] = common.seq_lens_cpu_upper_bound[: common.num_reqs].tolist()
    return lengths


def padded_lengths(
    ends: list[int], seq_lens: list[int], num_tokens: int
) -> tuple[list[int], list[int]]:
    """Lengths of a step that is padded to a graph's size, with requests that are padding.

    ends:       cumulative query lengths; those of padding repeat the last real one
    seq_lens:   all tokens of each request
    num_tokens: rows of the step; those after the last real one belong to padding in equal parts
    Returns both with padding as requests of as many tokens as they have queries: they see the
    first tokens of the null block, and their slots, -1, are never written.
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


class NPUAttentionMetadataBuilder(AttentionMetadataBuilder[NPUAttentionMetadata]):
    """Turns vLLM's batch description into host length lists. Never reads from the device.

    prompt_lens: gives the lengths of the batch's prompts, of models in which all of a prompt that
                 has an image sees itself both ways; None of models whose images alone do
    """

    prompt_lens: Callable[[], Sequence[int]] | None = None
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(  # abstract in vLLM
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._stripes = stripes_of(vllm_config)

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec
    ) -> AttentionCGSupport:
        """Attention in torch's operators has shapes that lengths decide: no graph holds it."""
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
        if ranges and self.prompt_lens is not None:
            ranges = whole_prompts(ranges, self.prompt_lens())
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
