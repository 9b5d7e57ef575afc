"""The paged cache of multi-head MLA: one latent and one rotary row per token."""

from typing import NamedTuple

import torch


class LatentCache(NamedTuple):
    """Compressed keys and values of one layer, shared by all heads.

    latent:                 [num_blocks, block_size, 1, kv_lora_rank], contiguous
    rotary:                 [num_blocks, block_size, 1, qk_rope_head_dim], contiguous
    latent_flat, rotary_flat: the same memory as [num_blocks, block_size, size]
    """

    latent: torch.Tensor
    rotary: torch.Tensor
    latent_flat: torch.Tensor
    rotary_flat: torch.Tensor

    @classmethod
    def of(cls, latent: torch.Tensor, rotary: torch.Tensor) -> "LatentCache":
        return cls(latent, rotary, latent.flatten(2), rotary.flatten(2))

    @classmethod
    def in_region(
        cls, region: torch.Tensor, block_size: int, latent_size: int, rotary_size: int
    ) -> "LatentCache":
        """The latent rows of all blocks, then their rotary rows.

        region: [num_blocks * block_size * (latent_size + rotary_size)], in the cache's dtype
        """
        num_rows = region.numel() // (latent_size + rotary_size)
        latent, rotary = region.split([num_rows * latent_size, num_rows * rotary_size])
        return cls.of(
            latent.view(-1, block_size, 1, latent_size), rotary.view(-1, block_size, 1, rotary_size)
        )

    @property
    def block_size(self) -> int:
        return self.latent.shape[1]
