"""The cache of multi-head latent attention: one compressed row per token."""

from typing import NamedTuple

import torch
import torch_npu

from vllm_davinci.core.attention.mla.context import ContextChunk


class MLACache(NamedTuple):
    """Compressed keys and values of one layer's tokens, shared by all heads.

    kv_c:                 [num_blocks, block_size, 1, kv_lora_rank], contiguous
    k_pe:                 [num_blocks, block_size, 1, qk_rope_head_dim], contiguous
    kv_c_flat, k_pe_flat: the same memory as [num_blocks, block_size, size]
    """

    kv_c: torch.Tensor
    k_pe: torch.Tensor
    kv_c_flat: torch.Tensor
    k_pe_flat: torch.Tensor

    @classmethod
    def in_region(
        cls, region: torch.Tensor, block_size: int, kv_lora_rank: int, qk_rope_head_dim: int
    ) -> "MLACache":
        """The kv_c rows of all blocks, then their k_pe rows.

        region: [num_blocks * block_size * (kv_lora_rank + qk_rope_head_dim)], in the cache's dtype
        """
        num_rows = region.numel() // (kv_lora_rank + qk_rope_head_dim)
        kv_c, k_pe = (
            part.view(-1, block_size, 1, part.numel() // num_rows)
            for part in region.split([num_rows * kv_lora_rank, num_rows * qk_rope_head_dim])
        )
        return cls(kv_c, k_pe, kv_c.flatten(2), k_pe.flatten(2))

    def gather(self, chunk: ContextChunk) -> tuple[torch.Tensor, torch.Tensor]:
        """The chunk's rows, one request after the other.

        Returns kv_c [num_rows, kv_lora_rank] and k_pe [num_rows, qk_rope_head_dim].
        """
        num_rows = chunk.actual_seq_lengths_kv[-1]
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
