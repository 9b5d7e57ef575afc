"""Attention to the tokens of chosen groups and of the open group (GLM-5.3, Qwen3.8-Flash-Next).

An indexer's keys are pooled per group, as DeepSeek-V4's rows are; the attention itself reads the
rows of single tokens.
"""

from typing import Any

import torch
from torch import nn

from vllm_davinci.core.attention.compressed.compressor import Compressor, MeanKeys
from vllm_davinci.core.attention.compressed.row_cache import RowCacheLayer, RowKind
from vllm_davinci.core.attention.compressed.row_indexer import RowChoice
from vllm_davinci.core.attention.compressed.step_tokens import StepTokens
from vllm_davinci.core.attention.gathered import attend_to_rows, take_most_memory


class PooledKeys(Compressor):
    """An indexer's keys: normalized before they are pooled, and not rotated.

    `fused_wkv_wgate` gives keys, then gates; `norm` is the keys' layer norm.
    """

    def __init__(self, ratio: int, size: int, **options: Any) -> None:
        super().__init__(ratio, size, rope=None, overlaps=False, **options)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, hidden_size]. Returns [num_tokens, 2 * size], fp32."""
        projected: Any = self.fused_wkv_wgate(x)
        keys, gates = projected[0].chunk(2, dim=-1)
        return torch.cat([self.norm(keys), gates], dim=-1).float()

    def finish(
        self, pooled: torch.Tensor, positions: torch.Tensor, step: StepTokens
    ) -> torch.Tensor:
        return pooled


class PooledAttention(nn.Module):
    """One layer's rows, and the attention to those that its indexer chose.

    size:         of a row: key and value of all heads; with key heads: all heads' keys, then their
                  values
    scale:        of scores
    keys:         the indexer's keys
    num_chosen:   most groups that a query sees, besides the open one
    num_kv_heads: key heads of this rank; None if a row is key and value of all heads
    """

    def __init__(
        self,
        *,
        size: int,
        dtype: torch.dtype,
        scale: float,
        keys: Compressor | MeanKeys,
        num_chosen: int,
        prefix: str,
        num_kv_heads: int | None = None,
    ) -> None:
        super().__init__()
        self._ratio, self._scale, self._num_kv_heads = keys.ratio, scale, num_kv_heads
        self._most = num_chosen * keys.ratio + keys.ratio - 1
        self.rows = RowCacheLayer(RowKind(size, dtype), f"{prefix}.rows")
        self._choice = RowChoice(keys, num_chosen)

    def step(self, positions: torch.Tensor) -> StepTokens | None:
        """The step's tokens; None if the step serves no requests.

        positions: [num_tokens], int64, padding included
        """
        metadata = self.rows.metadata
        return None if metadata is None else metadata.tokens(positions)

    def take_most_memory(self, query: torch.Tensor) -> None:
        """query: [num_tokens, heads, size]. For the profile run."""
        take_most_memory(self._spread(query), self._most)

    def attend(
        self,
        query: torch.Tensor,
        rows: torch.Tensor,
        step: StepTokens,
        index: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Writes the tokens' rows, and attends. The pooled keys have been written before.

        query: [num_tokens, heads, size]; rows: [num_tokens, size]
        index: queries and weights for `RowChoice.choose`
        Returns a new tensor like query.
        """
        own, tokens = self.rows.write(step, rows), step.all
        chosen = self._choice.choose(*index, step)
        width = chosen.shape[1] * self._ratio + self._ratio - 1

        def rows_of(part: slice) -> tuple[torch.Tensor, torch.Tensor]:
            numbers, is_hidden = self._visible(
                chosen[part], tokens.positions[part], tokens.requests[part]
            )
            # Hidden rows may be uninitialized; the token's own row is finite.
            return torch.where(is_hidden, own[part].unsqueeze(1), numbers), is_hidden

        spread = self._spread(query)
        out = attend_to_rows(spread, self.rows.rows, rows_of, width, self._scale)
        return self._values(out, query)

    def _spread(self, query: torch.Tensor) -> torch.Tensor:
        """Pads queries to the width of rows: zero except at the keys of their key head.

        query: [num_tokens, heads, size]. The heads of one key head follow each other.
        """
        if (count := self._num_kv_heads) is None:
            return query
        by_key = query.unflatten(1, (count, -1))
        spread = query.new_zeros(*by_key.shape[:3], 2, count, query.shape[2])
        for number in range(count):
            spread[:, number, :, 0, number] = by_key[:, number]
        return spread.flatten(3).flatten(1, 2)

    def _values(self, out: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """Returns the values' part of each head's weighted rows, in query's shape."""
        if (count := self._num_kv_heads) is None:
            return out
        parts = out.view(len(query), count, -1, 2, count, query.shape[2])
        own = [parts[:, number, :, 1, number] for number in range(count)]
        return torch.stack(own, dim=1).view_as(query)

    def _visible(
        self, groups: torch.Tensor, positions: torch.Tensor, requests: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices of the rows of chosen groups, then of the open group, and a mask of hidden ones.

        groups: [n, most chosen], -1 after the last; positions, requests: [n], as in `Tokens`
        Returns [n, width] each. The open group is empty after a group's last token.
        """
        last = positions.unsqueeze(1)
        within = torch.arange(self._ratio, device=groups.device)
        closed = (groups.unsqueeze(2) * self._ratio + within).flatten(1)
        opened = (last + 1) // self._ratio * self._ratio + within[:-1]
        is_hidden = torch.cat([closed < 0, opened > last], dim=1)
        own = last.expand_as(is_hidden)
        places = torch.where(is_hidden, own, torch.cat([closed, opened], dim=1))
        return self.rows.numbers(places, requests.unsqueeze(1)), is_hidden
