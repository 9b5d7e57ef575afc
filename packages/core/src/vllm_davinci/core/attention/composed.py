"""Attention composed of torch operators, for scores that the fused operator does not support.

Scores are soft-capped (Gemma 2) or have ALiBi's biases (Bloom, MPT, Baichuan-13B), or heads are
wider than the operator supports (Gemma 4). Pages are gathered and everything is computed in fp32:
exact, and far slower than the fused operator. Lengths come from host lists, so nothing here reads
from the device; these steps are not captured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from vllm.config import get_current_vllm_config_or_none

from vllm_davinci.core.attention.composed_plan import ComposedPlan, Piece, most_elements
from vllm_davinci.core.attention.paged_cache import PagedCache

if TYPE_CHECKING:
    from vllm_davinci.core.attention.metadata import NPUAttentionMetadata

# Limit of attention over a paged cache with uncompressed keys. Source: the operator's
# documentation, constraints of the head size D.
LARGEST_HEAD_SIZE = 256


@dataclass(frozen=True)
class ScoreRule:
    """A layer's rule for scoring keys.

    window:       how many keys a query sees, itself included; None for all
    soft_cap:     scores become soft_cap * tanh(scores / soft_cap); None leaves them as they are
    alibi_slopes: per head, the bias per position from the query to a key; None for none
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    alibi_slopes: Sequence[float] | None = None

    def beyond_operator(self, head_size: int) -> str:
        """Names the first property that the fused operator does not support; empty if none."""
        if self.soft_cap is not None:
            return f"soft-capped attention logits (cap {self.soft_cap})"
        if self.alibi_slopes is not None:
            return "ALiBi position biases"
        return f"heads of {head_size} entries" if head_size > LARGEST_HEAD_SIZE else ""


class ComposedAttention:
    """Attention of one layer over its cache, which already holds the step's keys."""

    def __init__(self, rule: ScoreRule, num_kv_heads: int) -> None:
        self._rule = rule
        self._num_kv_heads = num_kv_heads
        self._slopes: torch.Tensor | None = None
        config = get_current_vllm_config_or_none()
        model = None if config is None else config.model_config
        self._max_model_len = 1 if model is None else model.max_model_len

    def attend(
        self,
        query: torch.Tensor,
        cache: PagedCache,
        metadata: "NPUAttentionMetadata",
        out: torch.Tensor,
    ) -> None:
        """query, out: [num_tokens, num_heads, head_size]; out is written."""
        plan = metadata.composed_plan
        self._attend(query, cache, plan, metadata.block_table, metadata.causal, out)
        if (spans := metadata.spans) is not None:
            rows = query.index_select(0, spans.rows)
            both_ways = torch.empty_like(rows)
            self._attend(rows, cache, spans.composed_plan, spans.block_table, False, both_ways)
            out.index_copy_(0, spans.rows, both_ways)

    def take_most_memory(self, query: torch.Tensor) -> None:
        """Allocates and frees the largest chunk's memory, so that vLLM's profile run counts it."""
        num_heads, head_size = query.shape[1:]
        key_width = self._num_kv_heads * head_size
        keys, scores = most_elements(num_heads, key_width, self._max_model_len)
        held = [query.new_empty(keys, dtype=torch.float32) for _ in range(4)]
        held += [query.new_empty(scores, dtype=torch.float32) for _ in range(3)]
        del held

    def _attend(
        self,
        query: torch.Tensor,
        cache: PagedCache,
        plan: ComposedPlan,
        block_table: torch.Tensor,
        is_causal: bool,
        out: torch.Tensor,
    ) -> None:
        for piece in plan.pieces(query.shape[1], cache.key_flat.shape[-1]):
            rows = query[piece.rows].unflatten(0, (piece.num_requests, -1))
            result = self._of_piece(rows, cache, piece, block_table, is_causal)
            out[piece.rows].copy_(result.flatten(0, 1))

    def _of_piece(
        self,
        query: torch.Tensor,
        cache: PagedCache,
        piece: Piece,
        block_table: torch.Tensor,
        is_causal: bool,
    ) -> torch.Tensor:
        """query: [requests, tokens, heads, head_size]; returns the same shape in fp32."""
        num_requests, _, _, size = query.shape
        blocks = block_table[piece.requests, : piece.num_blocks].flatten()
        grouped = query.float().unflatten(2, (self._num_kv_heads, -1)).permute(0, 2, 3, 1, 4)
        keys, values = (
            part.index_select(0, blocks).view(num_requests, -1, self._num_kv_heads, size).float()
            for part in cache.parts
        )
        positions = torch.arange(keys.shape[1], device=query.device)
        is_unwritten = positions >= piece.seq_lens[:, None]
        # Cache entries beyond a request's tokens are uninitialized and may be NaN.
        values.masked_fill_(is_unwritten[..., None, None], 0)
        products = grouped.flatten(2, 3) @ keys.permute(0, 2, 3, 1)
        del keys
        distance = positions - piece.positions[..., None]  # [requests, tokens, keys]
        is_hidden = distance > 0 if is_causal else is_unwritten[:, None].expand_as(distance)
        if self._rule.window is not None:
            is_hidden = is_hidden | (distance < 1 - self._rule.window)
        scores = self._scores(products.view(*grouped.shape[:-1], -1), distance)
        scores.masked_fill_(is_hidden[:, None, None], float("-inf"))
        weights = scores.softmax(-1)
        del scores, products
        result = weights.flatten(2, 3) @ values.transpose(1, 2)
        return result.view_as(grouped).permute(0, 3, 1, 2, 4).flatten(2, 3)

    def _scores(self, products: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
        """Scores from products of queries and keys, in place.

        products: [requests, kv heads, queries of each, tokens, keys]
        distance: [requests, tokens, keys], position of the key minus position of the query
        """
        scores = products.mul_(self._rule.scale)
        if (cap := self._rule.soft_cap) is not None:
            scores = scores.div_(cap).tanh().mul_(cap)
        if self._rule.alibi_slopes is not None:
            if self._slopes is None:
                slopes = torch.tensor(self._rule.alibi_slopes, dtype=torch.float32)
                self._slopes = slopes.to(products.device).view(1, products.shape[1], -1, 1, 1)
            scores.addcmul_(self._slopes, distance[:, None, None].float())
        return scores
