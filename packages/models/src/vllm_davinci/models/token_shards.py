"""A step's tokens in equal shards, one per tensor-parallel rank."""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_reduce_scatter,
)

from vllm_davinci.core.layers.quantized_activation import map_rows


@dataclass(frozen=True)
class TokenShards:
    """Assigns rows to ranks: rank r has rows [r * size, (r + 1) * size); the last are padded.

    num_tokens: rows of the step
    size:       rows of one shard
    """

    num_tokens: int
    size: int
    rank: int
    num_ranks: int

    @classmethod
    def of_step(cls, num_tokens: int) -> "TokenShards":
        num_ranks = get_tensor_model_parallel_world_size()
        return cls(
            num_tokens, -(-num_tokens // num_ranks), get_tensor_model_parallel_rank(), num_ranks
        )

    def shard(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's shard of rows that every rank holds: [num_tokens, n] -> [size, n]."""
        return self._padded(rows).narrow(0, self.rank * self.size, self.size)

    def all_gather(self, shard: torch.Tensor) -> torch.Tensor:
        """All ranks' shards in order: [size, n] -> [num_tokens, n].

        Gathers rows as integers if a norm has quantized them for the next layer.

        """
        return map_rows(
            shard, lambda rows: tensor_model_parallel_all_gather(rows, 0)[: self.num_tokens]
        )

    def reduce_scatter(self, partial: torch.Tensor) -> torch.Tensor:
        """This rank's shard of the sum over ranks: [num_tokens, n] -> [size, n]."""
        return tensor_model_parallel_reduce_scatter(self._padded(partial), 0)

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        missing = self.num_ranks * self.size - self.num_tokens
        return pad(rows, (0, 0, 0, missing)) if missing else rows
