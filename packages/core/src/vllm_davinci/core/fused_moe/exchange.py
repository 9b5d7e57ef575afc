"""Tokens of all DP ranks to the ranks of their experts, and results back.

A rank enters with the tokens of its DP rank, which all ranks of the DP rank hold alike, or, in a
sequence-parallel layer, with a share of its own. It leaves with a part of the sum for the tokens
it came with, and vLLM's runner adds the parts up over the DP rank together with the shared
experts': one reduction for both. In a sequence-parallel layer each rank leaves with the whole sum.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import get_dp_group, get_ep_group
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.forward_context import get_forward_context

from vllm_davinci.core.fused_moe.all_to_all import all_to_all
from vllm_davinci.core.fused_moe.beside import ALONE, Beside
from vllm_davinci.core.fused_moe.communication import ONE_DP_RANK, Scheme, SchemeRule
from vllm_davinci.core.fused_moe.fused import dispatch_and_combine
from vllm_davinci.core.fused_moe.process_groups import expert_group, fused_group
from vllm_davinci.core.fused_moe.row_counts import CountsWait
from vllm_davinci.core.log import init_logger

if TYPE_CHECKING:
    from vllm_davinci.core.fused_moe.forward import RoutedForward

logger = init_logger(__name__)


@dataclass(frozen=True)
class TokenExchange:
    """One layer's way between ranks.

    sequence_parallel: whether each rank of a DP rank enters with tokens of its own
    tp_rank:           this rank's place in its DP rank
    counts_wait:       the host's, where the scheme has one
    """

    rule: SchemeRule
    sequence_parallel: bool
    tp_rank: int
    counts_wait: CountsWait

    def __call__(
        self,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        forward: "RoutedForward",
        beside: Beside = ALONE,
    ) -> torch.Tensor:
        """x: [num_tokens, hidden_size]. Returns this rank's part of the sum, shaped like x."""
        sizes = self._sizes(x.shape[0])
        per_dp_rank = self.rule.tp_size if self.sequence_parallel else 1
        choice = self.rule.choose(max(sizes) * per_dp_rank)
        logger.info_once("Mixture of experts: %s, because %s.", choice.scheme.value, choice.reason)
        if choice.scheme is Scheme.ALL_GATHER:
            return gather_and_scatter(x, router_logits, forward, self._token_group, sizes, beside)
        if choice.scheme is Scheme.MULTICAST:
            return multicast_and_reduce(x, router_logits, forward, self._token_group, sizes, beside)
        layout = self.rule.layout
        num_shares = 1 if self.sequence_parallel else self.rule.tp_size // layout.etp_size
        send: Callable[..., torch.Tensor]
        if choice.scheme is Scheme.FUSED:
            most_tokens = -(-max(sizes) // num_shares)
            send = partial(dispatch_and_combine, group=fused_group(layout), most_tokens=most_tokens)
        else:
            send = partial(all_to_all, group=expert_group(layout), counts_wait=self.counts_wait)
        send = partial(send, forward=forward, beside=beside)
        return self._of_own_share(send, num_shares, x, router_logits)

    @property
    def _token_group(self) -> GroupCoordinator:
        """Ranks that between them hold every token once."""
        return get_ep_group() if self.sequence_parallel else get_dp_group()

    def _sizes(self, num_tokens: int) -> list[int]:
        """Tokens of each rank of the token group."""
        metadata = get_forward_context().dp_metadata
        if metadata is None:  # one DP rank
            return [num_tokens] * self._token_group.world_size
        sizes = metadata.get_chunk_sizes_across_dp_rank()
        assert sizes is not None
        return sizes

    def _of_own_share(
        self,
        send: Callable[..., torch.Tensor],
        num_shares: int,
        x: torch.Tensor,
        router_logits: torch.Tensor,
    ) -> torch.Tensor:
        """What `send` makes of this rank's share of the tokens; zeros for the others."""
        if num_shares == 1:
            return send(x, router_logits)
        num_tokens = x.shape[0]
        size = -(-num_tokens // num_shares)
        share = slice((start := self.tp_rank // self.rule.layout.etp_size * size), start + size)
        if missing := size * num_shares - num_tokens:
            x = torch.nn.functional.pad(x, (0, 0, 0, missing))
            router_logits = torch.nn.functional.pad(router_logits, (0, 0, 0, missing))
        result = torch.zeros_like(x)
        result[share] = send(x[share], router_logits[share])
        return result[:num_tokens]


def gather_and_scatter(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    forward: "RoutedForward",
    group: GroupCoordinator,
    sizes: list[int],
    beside: Beside = ALONE,
) -> torch.Tensor:
    """All tokens everywhere; each rank computes its experts; sums go back to the tokens' ranks.

    sizes: tokens of each rank of the group
    """
    beside.chosen()  # the choice itself is made on the other side
    if group.world_size == 1:
        return forward.compute(x, *forward.route(x, router_logits), beside)
    all_x, all_logits = group.all_gatherv([x, router_logits], 0, sizes)
    partial = forward.compute(all_x, *forward.route(all_x, all_logits), beside)
    return group.reduce_scatterv(partial, 0, sizes)


def multicast_and_reduce(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    forward: "RoutedForward",
    group: GroupCoordinator,
    sizes: list[int],
    beside: Beside = ALONE,
) -> torch.Tensor:
    """Each rank broadcasts its tokens in turn; sums are reduced everywhere; own ones are kept."""
    beside.chosen()  # the choice itself is made on the other side
    if group.world_size == 1:
        return forward.compute(x, *forward.route(x, router_logits), beside)
    all_x, all_logits = _multicast(x, group, sizes), _multicast(router_logits, group, sizes)
    partial = forward.compute(all_x, *forward.route(all_x, all_logits), beside)
    return group.all_reduce(partial).split(sizes)[group.rank_in_group]


def _multicast(rows: torch.Tensor, group: GroupCoordinator, sizes: list[int]) -> torch.Tensor:
    """The rows of all ranks, at their cumulative counts."""
    everyone = rows.new_empty((sum(sizes), *rows.shape[1:]))
    parts = everyone.split(sizes)
    parts[group.rank_in_group].copy_(rows)
    comm: Any = group.device_communicator
    for source, part in enumerate(parts):
        comm.broadcast(part, source)
    return everyone


def exchange_between_ranks(
    rule: SchemeRule, sequence_parallel: bool, tp_rank: int, counts_wait: CountsWait
) -> TokenExchange | None:
    """What a layer needs; None where the tokens of one DP rank stay where they are."""
    if rule.dp_size == 1 and rule.forced in (None, Scheme.ALL_GATHER, Scheme.MULTICAST):
        if rule.forced is not None:
            logger.warning_once(
                "additional_config key 'moe_communication' = %r has no effect: %s. Remove the key.",
                rule.forced.value,
                ONE_DP_RANK,
            )
        elif rule.layout.world_size > 1:
            logger.info_once("Mixture of experts: no exchange of tokens, because %s.", ONE_DP_RANK)
        return None
    return TokenExchange(rule, sequence_parallel, tp_rank, counts_wait)
