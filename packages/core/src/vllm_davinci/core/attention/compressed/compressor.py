"""Learned pooling: one row per group of tokens, independent of how tokens are spread over steps.

The projections of the newest tokens have their own cache. A group's row is computed from it when
the group's last token arrives, so it does not depend on how a prompt was cut into chunks or on what
was already cached.
"""

from typing import Any

import torch
from torch import nn

from vllm_davinci.core.attention.compressed.rope import RopeTable
from vllm_davinci.core.attention.compressed.row_cache import RowCacheLayer, RowKind
from vllm_davinci.core.attention.compressed.step_tokens import StepTokens, Tokens

# Pages of projections per block of tokens, by ratio. With these numbers, a block has about as many
# bytes in this cache group as in the other groups of DeepSeek-V4.
STATE_PAGES = {4: 32, 128: 16}
# Most elements of gathered projections at once.
ELEMENTS = 2**24


class Compressor(nn.Module):
    """Rows of `size` entries for groups of `ratio` tokens.

    page_rows: of the cache that stores the rows (`RowKind`)
    overlaps:  a row also pools the previous group: that group's tokens through the first half of
               their features, its own tokens through the second half; None: DeepSeek-V4's rule, by
               ratio
    cache:     stores the rows, [.., size] in the model's dtype

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
    ) -> None:
        super().__init__()
        self.ratio, self.size = ratio, size
        self.overlaps = ratio == OVERLAPPING if overlaps is None else overlaps
        self.num_features = size * (1 + self.overlaps)
        self.fused_wkv_wgate, self.norm = projection, norm
        self._rope = rope
        ape = torch.empty(ratio, self.num_features, dtype=torch.float32)
        self.ape = nn.Parameter(ape, requires_grad=False)
        self._num_entries = ratio * (1 + self.overlaps)
        state = RowKind(
            2 * self.num_features,
            torch.float32,
            window=self._num_entries,
            pages=STATE_PAGES.get(ratio, 1),
        )
        self.states = RowCacheLayer(state, f"{prefix}.states")
        kind = RowKind(size, dtype, tokens_per_row=ratio, page_rows=page_rows)
        self.cache = RowCacheLayer(kind, f"{prefix}.rows")

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, hidden_size]. Returns [num_tokens, 2 * num_features], fp32."""
        projected: Any = self.fused_wkv_wgate(x)
        return projected[0].float()

    def write_rows(self, x: torch.Tensor, step: StepTokens) -> None:
        """Stores the step's projections and writes the rows of the groups that the step completes.

        x: [num_tokens, hidden_size]
        """
        projected = self.project(x)
        tokens = step.all
        projected[:, self.num_features :] += self.ape[tokens.positions % self.ratio]
        self.states.write(tokens, projected)
        last = step.closing(self.ratio)
        at_once = max(1, ELEMENTS // (self._num_entries * 2 * self.num_features))
        for start in range(0, len(last.rows), at_once):
            part = last.part(slice(start, start + at_once))
            self.cache.write(part, self._rows(part))

    def _rows(self, last: Tokens) -> torch.Tensor:
        """Rows of the groups whose last tokens these are: [n, size]."""
        back = torch.arange(1 - self._num_entries, 1, device=last.positions.device)
        positions = last.positions.unsqueeze(1) + back
        # `pool` masks positions before the first token; clamping keeps their indices valid.
        entries = self.states.numbers(positions.clamp(min=0), last.requests.unsqueeze(1))
        gathered = self.states.rows.index_select(0, entries.flatten())
        pooled = pool(gathered.view(*entries.shape, -1), positions >= 0, self.overlaps)
        # Clamped for graphs: tokens inside the first group have no row.
        return self.finish(pooled, (last.positions + (1 - self.ratio)).clamp_(min=0))

    def finish(self, pooled: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Applies norm and rotation to pooled rows. positions: of the groups' first tokens"""
        normed = self.norm(pooled.to(self.cache.kind.dtype))
        assert self._rope is not None
        return self._rope.rotate(normed.unsqueeze(1), self._rope.at(positions)).squeeze(1)


# The ratio whose groups overlap. Source: DeepSeek-V4, 2.3.1.
OVERLAPPING = 4


def pool(entries: torch.Tensor, is_there: torch.Tensor, overlaps: bool) -> torch.Tensor:
    """Sums the values, weighted per feature by a softmax of the gates over the row's tokens.

    entries:  [n, tokens of a row, 2 * features], fp32: values, then gates
    is_there: [n, tokens of a row]
    overlaps: the first half of the tokens uses the first half of the features, the second half
              the second
    Returns [n, size], fp32.
    """
    values, gates = entries.chunk(2, dim=-1)
    gates = gates.masked_fill(~is_there.unsqueeze(-1), float("-inf"))
    if overlaps:
        values, gates = (_own_halves(each) for each in (values, gates))
    return gates.softmax(dim=1).mul_(values).sum(dim=1)


def _own_halves(entries: torch.Tensor) -> torch.Tensor:
    before, own = entries.chunk(2, dim=1)
    half = entries.shape[-1] // 2
    return torch.cat([before[..., :half], own[..., half:]], dim=1)
