"""Exchanges queries and partial results between the ranks that share one context."""

from typing import Any

import torch
import torch_npu
from vllm.config import get_current_vllm_config
from vllm.distributed.parallel_state import get_dcp_group

# The log-sum-exp of a rank without tokens of a context. The operator writes +inf there, which
# CANN's formula of AttentionUpdate would turn into NaN. This value is below any finite score.
NO_TOKENS = -1e30


class StripeExchange:
    """Collectives of attention over a context divided among ranks.

    Each rank has its own query heads, and its own tokens of the cache for all heads.
    """

    def __init__(self) -> None:
        parallel = get_current_vllm_config().parallel_config
        self._sends_parts = parallel.dcp_comm_backend == "a2a"
        self._group: Any = get_dcp_group().device_communicator
        self._rank: int = self._group.rank_in_group

    def all_heads(self, query: torch.Tensor) -> torch.Tensor:
        """Gathers all ranks' heads: [tokens, heads, size] -> [tokens, all heads, size]."""
        gathered: torch.Tensor = self._group.all_gather(query, 1)
        return gathered

    def all_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Gathers the rows of all ranks, rank after rank; every rank gives the same number."""
        gathered: torch.Tensor = self._group.all_gather(rows, 0)
        return gathered

    def combine(self, part: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Merges the ranks' partial attention into attention over all tokens.

        part: [tokens, all heads, size], over this rank's tokens
        lse:  [tokens, all heads, 1] in fp32, its log-sum-exp; +inf without tokens
        Returns the result [tokens, heads, size] and its log-sum-exp [tokens, heads, 1], of this
        rank's heads, both in fp32.
        """
        lse = torch.where(torch.isinf(lse), NO_TOKENS, lse)
        return self._combine_sent(part, lse) if self._sends_parts else self._add_up(part, lse)

    def _combine_sent(
        self, part: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sends each rank the partial results of its heads (--dcp-comm-backend a2a)."""
        size, tokens = self._group.world_size, part.shape[0]
        rows = torch.cat([part.float(), lse], -1).unflatten(1, (size, -1))
        received = self._group.all_to_all(rows.movedim(1, 0).flatten(0, 1))
        parts = received.unflatten(0, (size, tokens))  # [size, tokens, heads, size of head + 1]
        heads = parts.shape[2]
        merged, merged_lse = torch_npu.npu_attention_update(
            [one[..., -1].flatten() for one in parts],
            [one[..., :-1].flatten(0, 1).contiguous() for one in parts],
            1,  # 1: also return the merged log-sum-exp
        )
        return merged.view(tokens, heads, -1), merged_lse.view(tokens, heads, 1)

    def _add_up(self, part: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights this rank's partial result and reduces over ranks (--dcp-comm-backend ag_rs)."""
        size = self._group.world_size
        by_rank = self._group.all_gather(lse, 0).unflatten(0, (size, -1))
        whole = torch.logsumexp(by_rank, 0)
        weighed = part.float() * torch.exp(lse - whole)
        merged = self._group.reduce_scatter(weighed, 1)
        heads = merged.shape[1]
        return merged, whole[:, self._rank * heads : (self._rank + 1) * heads].contiguous()


def joined(
    results: tuple[torch.Tensor, torch.Tensor],
    others: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
) -> None:
    """Merges attention over two sets of tokens into `out` [tokens, heads, size].

    results, others: attention over each set, like `out`, and its log-sum-exp [tokens, heads, 1]
    """
    parts, lses = zip(results, others, strict=True)
    merged, _ = torch_npu.npu_attention_update(
        [lse.flatten() for lse in lses],
        [part.float().flatten(0, 1) for part in parts],
        0,
    )
    out.copy_(merged.view_as(out))
