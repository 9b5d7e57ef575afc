"""Pooling: one row per group of tokens, independent of how tokens are spread over steps.

The projections of the newest tokens have their own cache. A group's row is computed from it when
the group's last token arrives, so it does not depend on how a prompt was cut into chunks or on what
was already cached.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vllm_davinci import operators
from vllm_davinci.core.attention.compressed.quantized_rows import QuantizedRows
from vllm_davinci.core.attention.compressed.rope import RopeTable
from vllm_davinci.core.attention.compressed.row_cache import RowCacheLayer, RowKind
from vllm_davinci.core.attention.compressed.step_tokens import StepTokens, Tokens
from vllm_davinci.core.components.fused_ops import fused_op

# Pages of projections per block of tokens, by ratio. With these numbers, a block has about as many
# bytes in this cache group as in the other groups of DeepSeek-V4.
STATE_PAGES = {4: 32, 128: 16}
# Pages of an indexer's projections beside quantized rows: a cache group of their own, so that none
# is larger than the group that shrinks with the rows.
QUANTIZED_STATE_PAGES = 8
# Most elements of gathered projections at once.
ELEMENTS = 2**24


class Compressor(nn.Module):
    """Rows of `size` entries for groups of `ratio` tokens.

    page_rows: of the cache that stores the rows (`RowKind`)
    overlaps:  a row also pools the previous group: that group's tokens through the first half of
               their features, its own tokens through the second half; None: DeepSeek-V4's rule, by
               ratio
    quantizes: whether the rows are stored as 8-bit integers
    cache:     stores the rows, [.., size]

    Parameters: `fused_wkv_wgate` gives values, then gates, of each token; `ape` is added to the
    gates by position in the group, fp32 [ratio, features]; `norm` is the norm of a row.
    """

    def __init__(
        self,
        ratio: int,
        size: int,
        *,
        projection: nn.Module,
        norm: nn.Module,
        rope: RopeTable | None,
        dtype: torch.dtype,
        prefix: str,
        page_rows: int | None = 1,
        overlaps: bool | None = None,
        quantizes: bool = False,
    ) -> None:
        super().__init__()
        self.ratio, self.size = ratio, size
        self.overlaps = ratio == OVERLAPPING if overlaps is None else overlaps
        self.num_features = size * (1 + self.overlaps)
        self.fused_wkv_wgate, self.norm = projection, norm
        self._rope, self._dtype = rope, dtype
        ape = torch.empty(ratio, self.num_features, dtype=torch.float32)
        self.ape = nn.Parameter(ape, requires_grad=False)
        self._num_entries = ratio * (1 + self.overlaps)
        state = RowKind(
            2 * self.num_features,
            torch.float32,
            window=self._num_entries,
            pages=QUANTIZED_STATE_PAGES if quantizes else STATE_PAGES.get(ratio, 1),
        )
        self.states = RowCacheLayer(state, f"{prefix}.states")
        kind = RowKind(size, dtype, tokens_per_row=ratio, page_rows=page_rows)
        cache = QuantizedRows if quantizes else RowCacheLayer
        self.cache = cache(kind, f"{prefix}.rows")

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, hidden_size]. Returns [num_tokens, 2 * num_features], fp32."""
        projected: Any = self.fused_wkv_wgate(x)
        return projected[0].float()

    def write_rows(self, x: torch.Tensor, step: StepTokens) -> None:
        """Stores the step's projections and writes the rows of the groups that the step completes.

        x: [num_tokens, hidden_size]
        """
        ratio, tokens = self.ratio, step.all
        last: Tokens = step.closing(ratio)
        places = step.shared(("places", ratio), lambda: tokens.positions % ratio)
        entries, is_missing = step.shared((self.states.key, "entries"), lambda: self._entries(last))
        compress = fused_op(operators.compress_tokens) or operators.compress_tokens
        pooled = compress(
            self.project(x),
            self.ape,
            places,
            self.states.rows,
            self.states.written(step),
            entries,
            is_missing,
            self.overlaps,
            max(1, ELEMENTS // (self._num_entries * 2 * self.num_features)),
        )
        if len(pooled) == 0:
            return
        # In a graph, tokens inside the first group have no row.
        first = step.shared(("first", ratio), lambda: (last.positions + (1 - ratio)).clamp_(min=0))
        self.cache.write(step, self.finish(pooled, first, step))

    def _entries(self, last: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices of the states of groups that end with these tokens, and a mask of missing states.

        [n, tokens of a row] each. Missing states have the first token's index.
        """
        back = torch.arange(1 - self._num_entries, 1, device=last.positions.device)
        positions = last.positions.unsqueeze(1) + back
        return self.states.numbers(
            positions.clamp(min=0), last.requests.unsqueeze(1)
        ), positions < 0

    def finish(
        self, pooled: torch.Tensor, positions: torch.Tensor, step: StepTokens
    ) -> torch.Tensor:
        """Normalizes and rotates pooled rows, by the positions of their groups' first tokens."""
        normed, rope = self.norm(pooled.to(self._dtype)), self._rope
        assert rope is not None
        by = step.shared((rope, self.ratio), lambda: rope.at(positions))
        return rope.rotate(normed.unsqueeze(1), by).squeeze(1)


class MeanKeys(nn.Module):
    """An indexer's keys: the mean of a group's keys, then a norm and a rotation.

    norm:      of a row
    rotate:    rows [n, size], first tokens of their groups -> rotated rows
    page_rows: of the cache that stores the rows (`RowKind`)
    """

    def __init__(
        self,
        ratio: int,
        size: int,
        *,
        norm: nn.Module,
        rotate: Callable[[torch.Tensor, Tokens], torch.Tensor],
        dtype: torch.dtype,
        prefix: str,
        page_rows: int | None,
    ) -> None:
        super().__init__()
        self.ratio, self.norm, self._rotate = ratio, norm, rotate
        self.states = RowCacheLayer(RowKind(size, dtype, window=ratio), f"{prefix}.states")
        kind = RowKind(size, dtype, tokens_per_row=ratio, page_rows=page_rows)
        self.cache = RowCacheLayer(kind, f"{prefix}.rows")

    def write_rows(self, keys: torch.Tensor, step: StepTokens) -> None:
        """Stores the step's keys and writes the rows of the groups that the step completes.

        keys: [num_tokens, size]
        """
        self.states.write(step, keys)
        entries, first = step.shared((self.states.key, "means"), lambda: self._entries(step))
        if len(entries) == 0:
            return
        gathered = self.states.rows.index_select(0, entries.flatten())
        pooled = gathered.view(*entries.shape, -1).float().mean(dim=1)
        self.cache.write(step, self._rotate(self.norm(pooled.to(keys.dtype)), first))

    def _entries(self, step: StepTokens) -> tuple[torch.Tensor, Tokens]:
        """Indices of the keys of the groups that the step completes, and their first tokens."""
        last = step.closing(self.ratio)
        within = torch.arange(self.ratio, device=last.positions.device)
        # In a graph, tokens inside the first group have no row.
        first = (last.positions + (1 - self.ratio)).clamp_(min=0)
        places = first.unsqueeze(1) + within
        numbers = self.states.numbers(places, last.requests.unsqueeze(1))
        return numbers, last._replace(positions=first)


# The ratio whose groups overlap. Source: DeepSeek-V4, 2.3.1.
OVERLAPPING = 4
