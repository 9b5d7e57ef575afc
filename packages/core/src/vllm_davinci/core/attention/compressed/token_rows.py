"""Ids and rotary positions of a request's newest tokens, which later tokens read."""

import torch
from torch import nn

from vllm_davinci.core.attention.compressed.row_cache import RowCacheLayer, RowKind
from vllm_davinci.core.attention.compressed.step_tokens import StepTokens, Tokens


class TokenRows(nn.Module):
    """A row of four integers per token: its id, then up to three rotary positions.

    window: number of newest tokens that are kept
    """

    def __init__(self, window: int, prefix: str) -> None:
        super().__init__()
        self.rows = RowCacheLayer(RowKind(4, torch.int32, window=window), prefix)

    def step(self, positions: torch.Tensor) -> StepTokens | None:
        """The step's tokens; None if the step serves no requests.

        positions: [num_tokens], or [3, num_tokens] of rotary ones, int64, padding included
        """
        metadata = self.rows.metadata
        return None if metadata is None else metadata.tokens(positions)

    def write(self, ids: torch.Tensor, positions: torch.Tensor, step: StepTokens) -> None:
        """ids: [num_tokens or more]; positions: [num_tokens or more], or [3, ..] of them"""
        num_tokens = step.num_tokens
        places = positions.expand(3, -1)[:, :num_tokens]
        written = torch.cat([ids[:num_tokens].unsqueeze(0), places]).t()
        self.rows.write(step, written)

    def ids_until(self, tokens: Tokens, count: int, missing: int) -> torch.Tensor:
        """The ids of each token and of those before it, the newest first: [n, count], int64.

        missing: id where the request has no token
        """
        positions = tokens.positions.unsqueeze(1) - torch.arange(
            count, device=tokens.positions.device
        )
        return self._entries(positions, tokens)[..., 0].masked_fill_(positions < 0, missing)

    def rope_positions(self, tokens: Tokens) -> torch.Tensor:
        """Rotary positions of kept tokens: [3, n], int64."""
        return self._entries(tokens.positions.unsqueeze(1), tokens)[:, 0, 1:].t()

    def _entries(self, positions: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        numbers = self.rows.numbers(positions.clamp(min=0), tokens.requests.unsqueeze(1))
        gathered = self.rows.rows.index_select(0, numbers.flatten())
        return gathered.view(*positions.shape, -1).long()
