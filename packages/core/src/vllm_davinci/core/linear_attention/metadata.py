"""The inputs of one step's linear attention, and the backend that builds them."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImplBase,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_davinci.core.attention.metadata import host_seq_lens
from vllm_davinci.core.graph.host_lengths import HostLengths
from vllm_davinci.core.linear_attention.chunk_plan import ChunkPlan, plan_chunks


@dataclass
class LinearAttentionMetadata(AttentionMetadata):
    """Inputs of one step and one cache group. Decodes stand first.

    num_decodes:  requests of one token that have a state, and as many tokens; with those that are
                  padding of a graph, whose block is the null block
    num_prefill_tokens: tokens of the other requests, which come next; later rows are padding
    blocks:       [num_reqs], int32, on the device: page of each request's states
    prefill:      how the other requests are computed; None without any
    host_lengths: set while a graph is captured; linear attention has no lengths in it
    """

    num_decodes: int
    num_prefill_tokens: int
    blocks: torch.Tensor
    prefill: ChunkPlan | None
    host_lengths: HostLengths | None = None

    def step_lengths(self) -> tuple[list[int], list[int]]:
        """None: no launch of a graph has lengths of the host."""
        return [], []

    def step_tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors of it that the device reads in a graph."""
        return (self.blocks,)


class LinearAttentionMetadataBuilder(AttentionMetadataBuilder[LinearAttentionMetadata]):
    """Turns vLLM's batch description into a plan of the host. Never reads from the device."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    reorder_batch_threshold = 1  # decodes first
    supports_update_block_table = True

    def __init__(
        self,
        kv_cache_spec: MambaSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        self._conv_width: int = layer.conv_kernel_size

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> LinearAttentionMetadata:
        common = common_attn_metadata
        lengths = common.query_start_loc_cpu[: common.num_reqs + 1].diff().tolist()
        is_fresh = [total <= new for total, new in zip(host_seq_lens(common), lengths, strict=True)]
        return self._build(common, lengths, is_fresh)

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> LinearAttentionMetadata:
        """All of a graph's requests decode, whatever lengths a capture gives them."""
        num_reqs = common_attn_metadata.num_reqs
        return self._build(common_attn_metadata, [1] * num_reqs, [False] * num_reqs)

    def _build(
        self, common: CommonAttentionMetadata, lengths: list[int], is_fresh: list[bool]
    ) -> LinearAttentionMetadata:
        num_reqs = len(lengths)
        is_decode = [new == 1 and not fresh for new, fresh in zip(lengths, is_fresh, strict=True)]
        num_decodes = is_decode.index(False) if False in is_decode else num_reqs
        num_others = sum(new > 0 for new in lengths[num_decodes:])
        prefill = None
        if num_others:
            others = slice(num_decodes, num_decodes + num_others)
            prefill = plan_chunks(lengths[others], is_fresh[others], self._conv_width, self.device)
        else:
            num_decodes = num_reqs  # those of no tokens are a graph's padding, of one row each
        return LinearAttentionMetadata(
            num_decodes=num_decodes,
            num_prefill_tokens=sum(lengths[num_decodes:]),
            blocks=common.block_table_tensor[:num_reqs, 0],
            prefill=prefill,
        )

    def update_block_table(
        self,
        metadata: LinearAttentionMetadata,
        blk_table: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> LinearAttentionMetadata:
        num_reqs = metadata.blocks.shape[0]
        return replace(metadata, blocks=blk_table[:num_reqs, 0], host_lengths=None)


class LinearAttentionBackend(AttentionBackend):
    """States in place of keys and values: one page per request."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return "GDN_ATTN"  # vLLM looks the name up in its own enumeration of backends

    @staticmethod
    def get_impl_cls() -> type[AttentionImplBase[Any]]:
        raise NotImplementedError("A layer of linear attention computes itself.")

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        return LinearAttentionMetadataBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...] | None:
        return (KVCacheLayout.LBNHC,)

    @classmethod
    def is_ssm(cls) -> bool:
        return True
