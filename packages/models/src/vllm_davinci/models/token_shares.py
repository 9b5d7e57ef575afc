"""Equal shares of a step's tokens, one per tensor-parallel rank."""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_reduce_scatter,
)

from vllm_davinci.core.quantization.handover import QuantizedNorm, StaticNorm


@dataclass(frozen=True)
class TokenShares:
    """Who holds which rows: rank r has rows [r * size, (r + 1) * size), the last ones padded.

    num_tokens: rows of the step
    size:       rows of one share
    """

    num_tokens: int
    size: int
    rank: int
    num_ranks: int

    @classmethod
    def of_step(cls, num_tokens: int) -> "TokenShares":
        num_ranks = get_tensor_model_parallel_world_size()
        return cls(
            num_tokens, -(-num_tokens // num_ranks), get_tensor_model_parallel_rank(), num_ranks
        )

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's share of rows that every rank has: [num_tokens, n] -> [size, n]."""
        return self._padded(rows).narrow(0, self.rank * self.size, self.size)

    def gather(self, share: torch.Tensor) -> torch.Tensor:
        """All ranks' shares in order: [size, n] -> [num_tokens, n].

        Rows that a norm has quantized for the layer behind it travel as integers.
        """
        if isinstance(share, QuantizedNorm | StaticNorm):
            return share.moved(self.gather)
        return tensor_model_parallel_all_gather(share, 0)[: self.num_tokens]

    def reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """This rank's share of the sum over ranks: [num_tokens, n] -> [size, n]."""
        return tensor_model_parallel_reduce_scatter(self._padded(partial), 0)

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        missing = self.num_ranks * self.size - self.num_tokens
        return pad(rows, (0, 0, 0, missing)) if missing else rows
