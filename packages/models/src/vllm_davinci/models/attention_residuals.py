"""Attention residuals: sublayers read a mix of the residual sums of all blocks of layers.

A block's layers add to one sum. Scores, a softmax over them and the mix are fp32.
"""

from typing import Any

import torch

# Most elements of a mix at once; their fp32 copies take 64 MiB.
_PIECE = 1 << 24


class AttentionResiduals:
    """The residual sums of a step: those of completed blocks, then the current one.

    The memory holds them one after another, so that a sum which is complete stays in its place.
    """

    def __init__(self, embedded: torch.Tensor, completed: torch.Tensor | None, most: int) -> None:
        """embedded: [num_tokens, hidden_size], the current sum; copied

        completed: [num_tokens, blocks, hidden_size], of previous pipeline stages
        most:      number of sums at the end of this pipeline stage
        """
        self._sums = embedded.new_empty(most, *embedded.shape)
        self._num_completed = 0 if completed is None else completed.shape[1]
        if completed is not None:
            self._sums[: self._num_completed].copy_(completed.transpose(0, 1))
        self.current.copy_(embedded)

    @property
    def current(self) -> torch.Tensor:
        """The current residual sum: [num_tokens, hidden_size], a view."""
        return self._sums[self._num_completed]

    def completed(self) -> torch.Tensor:
        """The sums of completed blocks, for the next stage: [num_tokens, blocks, hidden_size]."""
        return self._sums[: self._num_completed].transpose(0, 1).contiguous()

    def begin_block(self, output: torch.Tensor) -> None:
        """Completes the current sum and begins the next with a sublayer's output."""
        self._num_completed += 1
        self.current.copy_(output)

    def add(self, output: torch.Tensor) -> None:
        """Adds a sublayer's output to the current sum."""
        self.current.add_(output)

    def mix(self, norm: Any, projection: Any) -> torch.Tensor:
        """The input of a sublayer, before its own norm: [num_tokens, hidden_size].

        norm, projection: compute the score of each of a token's sums
        """
        if self._num_completed == 0:
            return self.current  # the softmax of one score is 1
        sums = self._sums[: self._num_completed + 1]
        weight = norm.weight.float() * projection.weight.float().squeeze(0)
        rows = max(1, _PIECE // (sums.shape[0] * sums.shape[2]))
        parts = [_mixed(part, weight, norm.variance_epsilon) for part in sums.split(rows, dim=1)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _mixed(sums: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Mixes sums [blocks, num_tokens, hidden_size] by their scores. weight: [hidden_size], fp32"""
    values = sums.float()
    scale = values.square().mean(dim=-1).add_(eps).rsqrt()
    shares = (values @ weight).mul_(scale).softmax(dim=0)
    return (values * shares.unsqueeze(-1)).sum(dim=0).to(sums.dtype)
