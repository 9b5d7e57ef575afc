"""Keys and values of a layer, in pages."""

from typing import NamedTuple

import torch
import torch_npu


class PagedCache(NamedTuple):
    """Keys and values of one layer.

    key, value:           [num_blocks, block_size, num_kv_heads, head_size], contiguous
    key_flat, value_flat: the same memory as [num_blocks, block_size, num_kv_heads * head_size]
    """

    key: torch.Tensor
    value: torch.Tensor
    key_flat: torch.Tensor
    value_flat: torch.Tensor

    @classmethod
    def of(cls, key: torch.Tensor, value: torch.Tensor) -> "PagedCache":
        return cls(key, value, key.flatten(2), value.flatten(2))

    def write(self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """Writes keys and values [tokens, num_kv_heads, head_size] to their slots; -1: skipped."""
        # The operator does not accept strided rows, as split from a joint projection.
        torch_npu.npu_scatter_pa_kv_cache(
            key.contiguous(), value.contiguous(), self.key, self.value, slots, cache_mode="Norm"
        )

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The regions that are divided into blocks, in order."""
        return self.key, self.value
