"""Lightning indexer over groups of tokens: chooses the compressed rows each query attends to."""

import torch
import torch_npu

from vllm_davinci import operators
from vllm_davinci.core.attention.compressed.compressor import Compressor, MeanKeys
from vllm_davinci.core.attention.compressed.row_cache import PAGE_ROWS
from vllm_davinci.core.attention.compressed.step_tokens import Span, StepTokens
from vllm_davinci.core.attention.mla.indexer import HEAD_SIZE, MAX_HEADS
from vllm_davinci.core.components.fused_ops import fused_op

# Most scores, over all heads, computed at once.
SCORES = 2**24


def key_page_rows(num_heads: int, size: int) -> int | None:
    """Rows per page when the operator reads an indexer's keys; None if it cannot."""
    return PAGE_ROWS if size == HEAD_SIZE and num_heads <= MAX_HEADS else None


class RowChoice:
    """Chooses among the rows of requests by keys that a compressor has written.

    keys:       the indexer's own compressor
    num_chosen: most rows per query
    """

    def __init__(self, keys: Compressor | MeanKeys, num_chosen: int) -> None:
        self._keys, self._num_chosen = keys, num_chosen

    def choose(self, query: torch.Tensor, weights: torch.Tensor, step: StepTokens) -> torch.Tensor:
        """Indices of the chosen rows within each request, best first; -1 after the last.

        query:   [num_tokens, heads, size], rotated
        weights: [num_tokens, heads], fp32
        Returns [num_tokens, width], int64, where width is at most `num_chosen`.
        """
        ratio = self._keys.ratio
        num_visible = step.num_complete(ratio)
        if step.in_graph:
            return self._choose_on_device(query, weights, num_visible, step)
        most = step.longest // ratio
        if most <= self._num_chosen:  # all rows are chosen, whatever their scores
            return visible_rows(num_visible, most)
        chosen = num_visible.new_full((step.num_tokens, self._num_chosen), -1)
        for span in step.spans:
            if num_rows := span.end // ratio:
                width = min(num_rows, self._num_chosen)
                part = span.rows, slice(width)
                chosen[part] = self._choose_of(span, query, weights, step, num_rows)
        return chosen

    def _choose_on_device(
        self,
        query: torch.Tensor,
        weights: torch.Tensor,
        num_visible: torch.Tensor,
        step: StepTokens,
    ) -> torch.Tensor:
        """`choose` with one operator call per part of the keys: each token is a request with the
        rows that it sees.

        The operator's causal mask counts keys, not groups of tokens.
        """
        lengths = num_visible.clamp(min=1).to(torch.int32)
        ends = torch.arange(1, len(query) + 1, dtype=torch.int32, device=query.device)
        parts = []
        for part, keys, table in self._keys.cache.page_parts(step):
            chosen, _ = torch_npu.npu_lightning_indexer(
                query[part],
                keys,
                weights[part],
                actual_seq_lengths_query=ends[: part.stop - part.start],
                actual_seq_lengths_key=lengths[part],
                block_table=table,
                layout_query="TND",
                layout_key="PA_BSND",
                sparse_count=self._num_chosen,
                sparse_mode=0,
            )
            parts.append(chosen)
        chosen = torch.cat(parts) if len(parts) > 1 else parts[0]
        chosen = chosen.squeeze(1).to(torch.int64)
        return chosen.masked_fill_(chosen >= num_visible.unsqueeze(1), -1)

    def _choose_of(
        self,
        span: Span,
        query: torch.Tensor,
        weights: torch.Tensor,
        step: StepTokens,
        num_rows: int,
    ) -> torch.Tensor:
        """The chosen rows of one request's tokens: [n, at most `num_chosen`]."""
        places, keys = self._keys.cache.of_request(step, span.request, num_rows)
        choose = fused_op(operators.choose_rows) or operators.choose_rows
        return choose(
            query[span.rows],
            weights[span.rows],
            keys.float(),
            places,
            step.num_complete(self._keys.ratio)[span.rows].unsqueeze(1),
            min(num_rows, self._num_chosen),
            max(1, SCORES // (query.shape[1] * num_rows)),
        )


def visible_rows(num_visible: torch.Tensor, width: int) -> torch.Tensor:
    """Row indices 0 to num_visible - 1 of each query, then -1: [num_tokens, width], int64."""
    places = torch.arange(width, device=num_visible.device).expand(len(num_visible), -1)
    return places.masked_fill(places >= num_visible.unsqueeze(1), -1)
