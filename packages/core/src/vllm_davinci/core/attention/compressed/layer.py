"""One layer's attention over the last tokens' own rows and over compressed rows."""

import torch
from torch import nn

from vllm_davinci.core.attention.compressed.compressor import Compressor
from vllm_davinci.core.attention.compressed.row_cache import RowCacheLayer, RowKind
from vllm_davinci.core.attention.compressed.row_indexer import RowChoice, visible_rows
from vllm_davinci.core.attention.compressed.step_tokens import StepTokens, Tokens
from vllm_davinci.core.attention.gathered import attend_to_rows, take_most_memory

# Pages of the window's rows per block of tokens.
WINDOW_PAGES = 4


class CompressedAttention(nn.Module):
    """One layer's caches, and the rows that its queries attend to.

    window:     number of newest tokens that a query sees uncompressed, itself included
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

    def shared_memory(self, positions: torch.Tensor) -> torch.Tensor:
        """Allocates as much memory as the layers' shared indices take, for the profile run."""
        return positions.new_empty(len(positions), 2 * self._num_window)

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
        own = self.window.write(step, rows)
        chosen, compressor = None, self._compressor[0]
        if self._choice is not None:
            assert index is not None
            chosen = self._choice.choose(*index, step)
        most = 0
        if compressor is not None:
            most = self._most_rows if step.in_graph else step.longest // compressor.ratio
            most = most if chosen is None else chosen.shape[1]
        tokens = step.all

        def rows_of(part: slice) -> tuple[torch.Tensor, torch.Tensor]:
            window, outside = step.shared(
                (self.window.key, self._block), lambda: self._of_window(tokens, own)
            )
            if compressor is None or not most:
                return window[part], outside[part]

            def of_groups() -> tuple[torch.Tensor, torch.Tensor]:
                groups = (
                    visible_rows(step.num_complete(compressor.ratio)[part], most)
                    if chosen is None
                    else chosen[part]
                )
                places, requests = groups.clamp(min=0), tokens.requests[part].unsqueeze(1)
                return compressor.cache.numbers(places, requests), groups < 0

            # Shared by all layers without a choice. Indices of part of the tokens are not worth the
            # memory.
            is_shared = chosen is None and part == slice(0, step.num_tokens)
            key = compressor.cache.key, "visible"
            numbers, hidden = step.shared(key, of_groups) if is_shared else of_groups()
            # Hidden rows may be uninitialized; the token's own row is finite.
            distance = compressor.cache.first_row - self.window.first_row
            numbers = torch.where(hidden, own[part].unsqueeze(1), numbers + distance)
            return torch.cat([window[part], numbers], 1), torch.cat([outside[part], hidden], 1)

        return attend_to_rows(
            query, self.window.rows, rows_of, self._num_window + most, self._scale, sinks
        )

    def _of_window(self, tokens: Tokens, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices of the window's rows, and a mask of missing ones: [num_tokens, window] each."""
        after, newest = self._block or 1, tokens.positions
        if self._block:
            newest = newest - tokens.rows % self._block
        back = torch.arange(after - self._num_window, after, device=newest.device)
        positions = newest.unsqueeze(1) + back
        numbers = self.window.numbers(positions.clamp(min=0), tokens.requests.unsqueeze(1))
        is_hidden = positions < 0
        return torch.where(is_hidden, own.unsqueeze(1), numbers), is_hidden
