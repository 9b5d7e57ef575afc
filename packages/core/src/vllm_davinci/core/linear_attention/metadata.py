"""Inputs of one step's linear attention, and the backend that builds them."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_davinci.core.attention.backend import LayersOwnBackendBase
from vllm_davinci.core.attention.metadata import host_seq_lens
from vllm_davinci.core.graph.host_lengths import HostLengths
from vllm_davinci.core.linear_attention.chunk_plan import ChunkPlan, plan_chunks
from vllm_davinci.core.linear_attention.verification import Verification, Verifications


@dataclass
class LinearAttentionMetadata(AttentionMetadata):
    """Inputs of one step and one cache group. Decodes come first.

    num_decodes:  requests with a state and one token, or with speculation up to all verified
                  tokens; includes a graph's padding requests, whose block is the null block
    num_decode_tokens:  their tokens
    num_prefill_tokens: tokens of the other requests, which come next; later rows are padding
    blocks:       [num_reqs, pages], int32, on the device: pages of each request's states
    prefill:      plan of the other requests; None without any
    verification: plan of the decodes, with speculation; else None
    host_lengths: set while a graph is captured; linear attention adds no lengths to it
    """

    num_decodes: int
    num_decode_tokens: int
    num_prefill_tokens: int
    blocks: torch.Tensor
    prefill: ChunkPlan | None
    verification: Verification | None = None
    host_lengths: HostLengths | None = None

    def step_lengths(self) -> tuple[list[int], list[int]]:
        """Empty lists: no launch of a graph uses lengths from the host."""
        return [], []


class LinearAttentionMetadataBuilder(GDNAttentionMetadataBuilder):
    """Turns vLLM's batch description into a plan on the host. Never reads from the device.

    Subclasses one of vLLM's builders, because vLLM tells only these which drafts were accepted.
    """

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self,
        kv_cache_spec: MambaSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        # vLLM's own constructor prepares its kernels.
        AttentionMetadataBuilder.__init__(self, kv_cache_spec, layer_names, vllm_config, device)
        layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        self._conv_width: int = layer.conv_kernel_size
        num_drafts = vllm_config.num_speculative_tokens
        self._num_pages = 1 + num_drafts
        self.reorder_batch_threshold = self._num_pages  # decodes first
        # Graphs read drafts' metadata in this builder's memory, so each builder must fill its own.
        self.supports_update_block_table = not num_drafts
        self._verifications: Verifications | None = None
        if num_drafts:
            num_requests = vllm_config.scheduler_config.max_num_seqs
            self._verifications = Verifications(num_requests, self._num_pages, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        num_accepted_tokens: torch.Tensor | None = None,
        num_decode_draft_tokens_cpu: torch.Tensor | None = None,
        fast_build: bool = False,
    ) -> LinearAttentionMetadata:
        """num_accepted_tokens: [num_reqs], int32, on the device, accepted in the previous step

        num_decode_draft_tokens_cpu: [num_reqs], drafts of each request, negative without any
        """
        common = common_attn_metadata
        lengths = common.query_start_loc_cpu[: common.num_reqs + 1].diff().tolist()
        is_fresh = [total <= new for total, new in zip(host_seq_lens(common), lengths, strict=True)]
        if num_accepted_tokens is not None and self._verifications is not None:
            self._verifications.take_accepted(num_accepted_tokens[: common.num_reqs])
        if num_decode_draft_tokens_cpu is None:
            return self._build(common, lengths, is_fresh, [0] * common.num_reqs)
        drafts = num_decode_draft_tokens_cpu[: common.num_reqs].tolist()
        return self._build(common, lengths, is_fresh, drafts)

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> LinearAttentionMetadata:
        """Treats all requests of a graph as decodes, whatever their lengths in the capture."""
        num_reqs, pages = common_attn_metadata.num_reqs, self._num_pages
        return self._build(
            common_attn_metadata, [pages] * num_reqs, [False] * num_reqs, [pages - 1] * num_reqs
        )

    def _build(
        self,
        common: CommonAttentionMetadata,
        lengths: list[int],
        is_fresh: list[bool],
        drafts: list[int],
    ) -> LinearAttentionMetadata:
        num_reqs, pages = len(lengths), self._num_pages
        is_decode = [
            0 < new <= pages and not fresh for new, fresh in zip(lengths, is_fresh, strict=True)
        ]
        num_decodes = is_decode.index(False) if False in is_decode else num_reqs
        num_others = sum(new > 0 for new in lengths[num_decodes:])
        prefill = verification = None
        if num_others:
            others = slice(num_decodes, num_decodes + num_others)
            prefill = plan_chunks(lengths[others], is_fresh[others], self._conv_width, self.device)
            num_decode_tokens = sum(lengths[:num_decodes])
        else:
            # Requests without tokens are a graph's padding; they have as many rows as other
            # requests.
            num_decodes, num_decode_tokens = num_reqs, sum(new or pages for new in lengths)
        if self._verifications is not None and num_decodes:
            verification = self._verifications.plan(lengths[:num_decodes], drafts[:num_decodes])
        return LinearAttentionMetadata(
            num_decodes=num_decodes,
            num_decode_tokens=num_decode_tokens,
            num_prefill_tokens=sum(lengths[num_decodes:]),
            blocks=common.block_table_tensor[:num_reqs, :pages],
            prefill=prefill,
            verification=verification,
        )

    def update_block_table(
        self, metadata: LinearAttentionMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> LinearAttentionMetadata:
        num_reqs, pages = metadata.blocks.shape
        return replace(metadata, blocks=blk_table[:num_reqs, :pages], host_lengths=None)


class LinearAttentionBackend(LayersOwnBackendBase):
    """Recurrent states instead of keys and values: one page per request."""

    @staticmethod
    def get_name() -> str:
        return "GDN_ATTN"  # vLLM looks the name up in its own enumeration of backends

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        return LinearAttentionMetadataBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...] | None:
        # Supports the second for models with row caches, whose other layers choose the layout.
        return (KVCacheLayout.LBNHC, KVCacheLayout.BLNHC)

    @classmethod
    def is_ssm(cls) -> bool:
        return True
