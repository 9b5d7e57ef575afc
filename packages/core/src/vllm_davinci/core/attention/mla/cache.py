"""The cache of MLA: one compressed row per token."""

from typing import NamedTuple

import torch
import torch_npu

from vllm_davinci.core.attention.mla.context import ContextChunk


class MLACache(NamedTuple):
    """Compressed keys and values of one layer's tokens, shared by all heads.

    index_k:              [num_blocks, block_size, 1, index_head_size], contiguous: keys
                          of the indexer, which chooses tokens; None in layers without an indexer
    kv_c:                 [num_blocks, block_size, 1, kv_lora_rank], contiguous
    k_pe:                 [num_blocks, block_size, 1, qk_rope_head_dim], contiguous
    kv_c_flat, k_pe_flat: the same memory as [num_blocks, block_size, size]
    """

    kv_c: torch.Tensor
    k_pe: torch.Tensor
    kv_c_flat: torch.Tensor
    k_pe_flat: torch.Tensor
    index_k: torch.Tensor | None = None

    @classmethod
    def in_region(
        cls,
        region: torch.Tensor,
        block_size: int,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        index_head_size: int = 0,
    ) -> "MLACache":
        """Splits a region: all blocks' kv_c rows, then their k_pe rows, then their index_k rows.

        region: [num_blocks * block_size * (kv_lora_rank + qk_rope_head_dim + index_head_size)], in
                the cache's dtype
        """
        sizes = [kv_lora_rank, qk_rope_head_dim, index_head_size]
        num_rows = region.numel() // sum(sizes)
        kv_c, k_pe, index_k = (
            part.view(num_rows // block_size, block_size, 1, size)
            for part, size in zip(region.split([num_rows * n for n in sizes]), sizes, strict=True)
        )
        flat = kv_c.flatten(2), k_pe.flatten(2)
        return cls(kv_c, k_pe, *flat, index_k if index_head_size else None)

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """The regions that are divided into blocks, in order."""
        both = (self.kv_c, self.k_pe)
        return both if self.index_k is None else (*both, self.index_k)

    def gather(self, chunk: ContextChunk) -> tuple[torch.Tensor, torch.Tensor]:
        """The chunk's rows, request after request.

        Returns kv_c [num_rows, kv_lora_rank] and k_pe [num_rows, qk_rope_head_dim].
        """
        num_rows = chunk.num_gathered
        kv_c = self.kv_c.new_empty(num_rows, 1, self.kv_c.shape[-1])
        k_pe = self.k_pe.new_empty(num_rows, 1, self.k_pe.shape[-1])
        torch_npu.npu_gather_pa_kv_cache(
            self.kv_c,
            self.k_pe,
            chunk.block_table,
            chunk.lengths,
            kv_c,
            k_pe,
            seq_offset=chunk.starts,
        )
        return kv_c.squeeze(1), k_pe.squeeze(1)
