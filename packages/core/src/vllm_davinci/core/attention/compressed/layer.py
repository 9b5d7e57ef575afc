"""One layer's attention over the last tokens' own rows and over compressed rows."""

import torch
from torch import nn

from vllm_davinci.core.attention.compressed.compressor import Compressor
from vllm_davinci.core.attention.compressed.row_cache import RowCacheLayer, RowKind
from vllm_davinci.core.attention.compressed.row_indexer import RowChoice, visible_rows
from vllm_davinci.core.attention.compressed.step_tokens import StepTokens, Tokens
from vllm_davinci.core.attention.gathered import attend_to_rows, queries_at_once, take_most_memory

# Pages of the window's rows that hold a block's tokens.
WINDOW_PAGES = 4


class CompressedAttention(nn.Module):
    """One layer's caches, and the rows that its queries attend to.

    window:     how many last tokens a query sees uncompressed, itself included
    compressor: writes rows that stand for groups of tokens; None in layers with a window only
    choice:     chooses among these rows; None if queries see all of them
    most_rows:  most compressed rows that a query sees
    block:      tokens of each request in a step that also attend to each other, in addition to the
                window before them; 0: causal attention
    """

    def __init__(
        self,
        *,
        size: int,
        dtype: torch.dtype,
        window: int,
        compressor: Compressor | None,
        choice: RowChoice | None,
        most_rows: int,
        prefix: str,
        block: int = 0,
    ) -> None:
        super().__init__()
        self._scale = size**-0.5
        self._num_window, self._most_rows, self._block = window + block, most_rows, block
        kind = RowKind(size, dtype, window=window, pages=WINDOW_PAGES)
        self.window = RowCacheLayer(kind, f"{prefix}.window")
        self._compressor = (compressor,)  # registered by the module that owns its weights
        self._choice = choice

    def step(self, positions: torch.Tensor) -> StepTokens | None:
        """The step's tokens; None if the step serves no requests.

        positions: [num_tokens], int64, padding included
        """
        metadata = self.window.metadata
        return None if metadata is None else metadata.tokens(positions)

    def take_most_memory(self, query: torch.Tensor) -> None:
        """query: [num_tokens, heads, size]. For the profile run."""
        take_most_memory(query, self._num_window + self._most_rows)

    def attend(
        self,
        query: torch.Tensor,
        rows: torch.Tensor,
        sinks: torch.Tensor,
        step: StepTokens,
        index: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        """Writes the tokens' own rows, and attends. The compressed rows have been written before.

        query: [num_tokens, heads, size]; rows: [num_tokens, size], both rotated
        index: queries and weights for `RowChoice.choose`, only in layers that choose rows
        Returns a new tensor like query.
        """
        tokens, compressor = step.all, self._compressor[0]
        own = self.window.write(tokens, rows)
        chosen = None
        if self._choice is not None:
            assert index is not None
            chosen = self._choice.choose(*index, step)
        out = torch.empty_like(query)
        most = 0
        if compressor is not None:
            most = self._most_rows if step.in_graph else step.longest // compressor.ratio
        width = self._num_window + (most if chosen is None else chosen.shape[1])
        at_once = queries_at_once(query.shape[1], query.shape[2], width)
        for start in range(0, step.num_tokens, at_once):
            part = slice(start, start + at_once)
            of_part = tokens.part(part)
            numbers, is_visible = self._of_window(of_part)
            if compressor is not None and most:
                groups = (
                    visible_rows((of_part.positions + 1) // compressor.ratio, most)
                    if chosen is None
                    else chosen[part]
                )
                first = groups.clamp(min=0) * compressor.ratio
                more = compressor.cache.numbers(first, of_part.requests.unsqueeze(1))
                numbers = torch.cat([numbers, more], dim=1)
                is_visible = torch.cat([is_visible, groups >= 0], dim=1)
            # Invisible rows may be uninitialized; the token's own row is finite.
            numbers = torch.where(is_visible, numbers, own[part].unsqueeze(1))
            out[part] = attend_to_rows(
                query[part], self.window.rows, numbers, is_visible, self._scale, sinks
            )
        return out

    def _of_window(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices of the window's rows and whether each exists: [n, window] each."""
        after, newest = self._block or 1, tokens.positions
        if self._block:
            newest = newest - tokens.rows % self._block
        back = torch.arange(after - self._num_window, after, device=newest.device)
        positions = newest.unsqueeze(1) + back
        requests = tokens.requests.unsqueeze(1)
        return self.window.numbers(positions.clamp(min=0), requests), positions >= 0
