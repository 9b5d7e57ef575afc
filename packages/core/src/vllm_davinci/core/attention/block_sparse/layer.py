"""Block-sparse grouped-query attention: each key head's queries attend to chosen blocks of keys.

A page of the operator is one block of one key head. Each key head of each token becomes a request
whose block table lists the chosen blocks, the query's own block last. While no request has more
blocks than a query may choose, requests attend to all of their tokens.
"""

from typing import Any

import torch
from vllm.config import CacheConfig, VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.v1.kv_cache_interface import KVCacheSpec

from vllm_davinci.core.attention.block_sparse.cache import BlockSparseCache
from vllm_davinci.core.attention.block_sparse.choice import (
    BlockRule,
    choose_blocks,
    take_most_memory,
)
from vllm_davinci.core.attention.block_sparse.metadata import (
    BlockSparseBackend,
    BlockSparseMetadata,
)
from vllm_davinci.core.attention.metadata import NPUAttentionMetadata
from vllm_davinci.core.device.soc import BLOCK_SIZE_TOKENS
from vllm_davinci.core.errors import UnsupportedFeatureError


class BlockSparseAttention(Attention):
    """One layer. Its implementation computes one key head at a time.

    num_heads, num_kv_heads: of this rank; each key head has one index head
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        rule: BlockRule,
        cache_config: CacheConfig | None,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__(
            num_heads // num_kv_heads,
            head_size,
            scale,
            num_kv_heads=1,
            cache_config=cache_config,
            quant_config=quant_config,
            prefix=prefix,
            attn_backend=BlockSparseBackend,
        )
        if self.impl.operator_head_size != head_size:
            raise UnsupportedFeatureError(
                f"{prefix} has heads of {head_size} entries, which the attention operator of this "
                "device and CANN does not take unpadded. Choose another model."
            )
        self.num_kv_heads, self.rule = num_kv_heads, rule
        self._max_model_len = get_current_vllm_config().model_config.max_model_len

    @property
    def num_graph_widths(self) -> int:
        """Number of graphs for each step size."""
        return len(self.rule.graph_widths(-(-self._max_model_len // BLOCK_SIZE_TOKENS)))

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        """Keys and values of all heads, and the index key, of each token."""
        spec: Any = super().get_kv_cache_spec(vllm_config)
        entries = 2 * self.num_kv_heads * self.head_size + self.rule.index_size
        return spec.__class__(
            block_size=spec.block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=spec.dtype,
            num_head_slots=1,
            state_content_bytes=entries * spec.dtype.itemsize,
        )

    def cache_in(self, region: torch.Tensor, block_size: int) -> BlockSparseCache:
        """The layer's cache in its region of memory, in the cache's dtype."""
        sizes = self.num_kv_heads, self.head_size, self.rule.index_size
        return BlockSparseCache.in_region(region, block_size, *sizes)

    def attend(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        index_query: torch.Tensor,
        index_key: torch.Tensor,
    ) -> torch.Tensor:
        """Writes the tokens' keys and values, and attends.

        positions:   [num_tokens], int64
        query:       [num_tokens, num_heads * head_size]
        key, value:  [num_tokens, num_kv_heads * head_size]
        index_query: [num_tokens, num_kv_heads * index_size]
        index_key:   [num_tokens, index_size]
        Returns a new tensor like query; zero in rows of padding.
        """
        num_kv, by_layer = self.num_kv_heads, get_forward_context().attn_metadata
        shaped = query.view(-1, num_kv, self.num_heads, self.head_size)
        index_query = index_query.view(-1, num_kv, self.rule.index_size)
        if not isinstance(by_layer, dict) or self.layer_name not in by_layer:
            take_most_memory(index_query, self.rule, self._max_model_len)
            return torch.zeros_like(query)
        metadata: Any = by_layer[self.layer_name]
        assert isinstance(metadata, BlockSparseMetadata)
        num_tokens = metadata.num_actual_tokens
        cache: Any = self.kv_cache
        heads = (-1, 1, self.head_size)
        cache.heads.write(
            key[:num_tokens].reshape(heads), value[:num_tokens].reshape(heads),
            metadata.slots_of_heads,
        )  # fmt: skip
        cache.write_index(index_key[:num_tokens], metadata.rows_of_slots)
        out = torch.zeros_like(shaped) if num_tokens < len(query) else torch.empty_like(shaped)
        if metadata.sees_all and num_kv == 1:
            self._attend(shaped[:num_tokens, 0], cache, metadata, out[:num_tokens, 0])
            return out.view_as(query)
        if metadata.sees_all:
            by_head = shaped[:num_tokens].transpose(0, 1).reshape(-1, *shaped.shape[2:])
            result = self._attend(by_head, cache, metadata.of_heads)
            out[:num_tokens].copy_(
                result.view(num_kv, num_tokens, *shaped.shape[2:]).transpose(0, 1)
            )
            return out.view_as(query)
        pages = choose_blocks(
            index_query[:num_tokens],
            cache.index_k,
            metadata.pieces(positions[:num_tokens]),
            metadata.block_table,
            self.rule,
        )
        rows, results = shaped[:num_tokens].flatten(0, 1), out[:num_tokens].flatten(0, 1)
        start = 0
        for of_call in metadata.of_chosen(pages):
            part = slice(start, start + of_call.num_actual_tokens)
            self._attend(rows[part], cache, of_call, results[part])
            start = part.stop
        return out.view_as(query)

    def _attend(
        self,
        query: torch.Tensor,
        cache: BlockSparseCache,
        metadata: NPUAttentionMetadata,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query, out: [num_tokens, num_heads of a key head, head_size]. Returns out."""
        impl: Any = self.impl
        out = torch.empty_like(query) if out is None else out
        result: torch.Tensor = impl.forward(
            self, query, None, None, cache.heads, metadata, output=out
        )
        return result
