"""The cache of block-sparse attention: pages with one key head each, and an index key per token."""

from typing import NamedTuple

import torch
import torch_npu

from vllm_davinci.core.attention.paged_cache import PagedCache


class BlockSparseCache(NamedTuple):
    """Keys and values of one layer, with the keys by which queries choose blocks.

    heads:   keys and values in pages of one key head each, so that queries of different heads can
             read different blocks: page block * num_kv_heads + head
    index_k: [num_blocks, block_size, index_head_size], contiguous
    """

    heads: PagedCache
    index_k: torch.Tensor

    @classmethod
    def in_region(
        cls,
        region: torch.Tensor,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        index_head_size: int,
    ) -> "BlockSparseCache":
        """Splits a region, in the cache's dtype: all blocks' keys, values, then index keys."""
        sizes = [num_kv_heads * head_size, num_kv_heads * head_size, index_head_size]
        num_rows = region.numel() // sum(sizes)
        key, value, index_k = region.split([num_rows * size for size in sizes])
        pages = (-1, block_size, 1, head_size)
        heads = PagedCache.of(key.view(pages), value.view(pages))
        return cls(heads, index_k.view(-1, block_size, index_head_size))

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """The regions that are divided into blocks, in order."""
        num_blocks = len(self.index_k)
        key, value = (part.view(num_blocks, -1, part.shape[-1]) for part in self.heads.parts)
        return key, value, self.index_k

    def write_index(self, key: torch.Tensor, rows: torch.Tensor) -> None:
        """Writes keys [num_tokens, index_head_size] to rows [num_tokens, 1], int64, all >= 0."""
        flat = self.index_k.view(-1, key.shape[-1])
        torch_npu.npu_scatter_nd_update_(flat, rows, key.contiguous())
