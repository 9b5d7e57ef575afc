"""One mixture-of-experts layer on this rank, from router logits to the routed sum."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from vllm.forward_context import get_forward_context, is_forward_context_available

from vllm_davinci.core.fused_moe.adapted_experts import AdaptedExperts, ExpertAdapters
from vllm_davinci.core.fused_moe.dispatcher.base import SelectedTokens
from vllm_davinci.core.fused_moe.dispatcher.local import LocalDispatcher
from vllm_davinci.core.fused_moe.dispatcher.pieces import ExpertPieces
from vllm_davinci.core.fused_moe.dispatcher_selector import DispatcherSelector
from vllm_davinci.core.fused_moe.load_record import LoadRecord
from vllm_davinci.core.fused_moe.local_experts import Experts
from vllm_davinci.core.fused_moe.replicas import ReplicaTable
from vllm_davinci.core.fused_moe.router import RoutingRule, select_experts
from vllm_davinci.core.fused_moe.shared_experts import (
    NO_OVERLAP,
    OverlapHooks,
    SharedExpertsOverlap,
)
from vllm_davinci.core.layers.prefetch import WeightPrefetch

LOCAL = LocalDispatcher()

# Counts physical experts [num_rows, top_k]; the second argument is the number of the first row.
Count = Callable[[torch.Tensor, int], None]


@dataclass(frozen=True)
class FusedMoEForward:
    """The forward of a layer with loaded weights.

    physical_experts: each expert's physical numbers; None if experts are in order
    dispatchers:      selects a step's dispatcher; None if tokens stay on their rank
    shared:           overlaps the layer's shared experts with the routed ones; None leaves them to
                      vLLM
    weight_prefetch:  prefetches the next layer's weights; None without the option
    pieces:           chunk size of the experts
    load:             counts the tokens of each physical expert, if experts are balanced
    adapters:         deltas of the routed experts; None without adapters, or if tokens of other
                      data-parallel ranks arrive, whose adapters this rank lacks
    """

    rule: RoutingRule
    experts: Experts
    physical_experts: ReplicaTable | None = None
    weight_on_input: bool = False
    dispatchers: DispatcherSelector | None = None
    shared: SharedExpertsOverlap | None = None
    weight_prefetch: WeightPrefetch | None = None
    pieces: ExpertPieces = field(default_factory=ExpertPieces)
    load: LoadRecord = field(default_factory=LoadRecord)
    adapters: ExpertAdapters | None = None

    def __call__(self, x: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        """This rank's partial sum of the routed experts; the sum over ranks is the layer's output.

        x: [num_tokens, hidden_size]; router_logits: [num_tokens, num_experts]
        Returns a new tensor shaped like x.
        """
        if self.shared is None:
            return self._routed(x, router_logits, NO_OVERLAP)
        with self.shared.beside(x) as hooks:
            return self.shared.reduced(self._routed(x, router_logits, hooks))

    def _routed(
        self, x: torch.Tensor, router_logits: torch.Tensor, hooks: OverlapHooks
    ) -> torch.Tensor:
        """See __call__. hooks: each called once, in order, on the main stream."""
        sums = self._sums(x, router_logits, hooks)
        if self.weight_prefetch is not None:
            self.weight_prefetch.begin()
        return sums

    def _sums(
        self, x: torch.Tensor, router_logits: torch.Tensor, hooks: OverlapHooks
    ) -> torch.Tensor:
        num_tokens = x.shape[0]
        dispatcher = LOCAL if self.dispatchers is None else self.dispatchers.of_step(num_tokens)

        if dispatcher.gathers:  # experts are selected after tokens have been sent
            hooks.pre_dispatch()
        x, router_logits = dispatcher.prepare(x, router_logits)
        count = self.load.of_step(dispatcher, num_tokens)

        slots, experts = self._adapted(num_tokens)

        if dispatcher.keeps_rows and hooks is NO_OVERLAP and experts is self.experts:
            fused_sums = self._fused(x, router_logits, count)
            if fused_sums is not None:
                return dispatcher.finalize(fused_sums, num_tokens)

        if dispatcher.balances_dummy_steps and is_dummy_step():
            tokens = self._select_evenly(x)
        else:
            tokens = self._select(x, router_logits)
            count(tokens.topk_ids, 0)
        tokens = tokens._replace(slots=slots)
        if not dispatcher.gathers:
            hooks.pre_dispatch()

        sums = SumsOfParts(tokens.x)
        parts = dispatcher.split(tokens, self.pieces)
        for number, part in enumerate(parts, 1):
            dispatched = dispatcher.dispatch(part, experts)
            if number == 1:
                hooks.post_dispatch()
            results = experts.of_dispatched(dispatched)
            if number == len(parts):
                hooks.pre_combine()
            sums.add(dispatcher.combine(results, dispatched))
            del dispatched, results  # frees worst-case rows before the next chunk
        return dispatcher.finalize(sums.whole, num_tokens)

    def _adapted(self, num_tokens: int) -> tuple[torch.Tensor | None, Experts | AdaptedExperts]:
        """The adapter slots of this rank's tokens, and the experts that compute them."""
        if self.adapters is None:
            return None, self.experts
        slots = self.adapters.slots(num_tokens)
        if slots is None and not self.experts.rounds_otherwise_adapted:
            return None, self.experts
        return slots, AdaptedExperts(self.experts, self.adapters)

    def _fused(
        self, x: torch.Tensor, router_logits: torch.Tensor, count: Count
    ) -> torch.Tensor | None:
        """All sums, by one call of a compiled operator per chunk; None without such an operator."""
        sums = SumsOfParts(x)
        for piece in self.pieces.of(len(x)):
            part = self._fused_piece(x[piece], router_logits[piece], piece.start, count)
            if part is None:
                return None
            sums.add(part)
            del part
        return sums.whole

    def _fused_piece(
        self, x: torch.Tensor, router_logits: torch.Tensor, row: int, count: Count
    ) -> torch.Tensor | None:
        """All sums of a chunk by one compiled call, if possible with selection; or None."""
        if self.physical_experts is None and not self.weight_on_input:
            sums = self.experts.fused_routed_experts(x, router_logits, self.rule)
            if sums is not None:
                return sums
        if self.experts.has_fused_op(x.dtype):
            tokens = self._select(x, router_logits)
            count(tokens.topk_ids, row)
            return self.experts.fused_experts(tokens.x, tokens.topk_weights, tokens.topk_ids)
        return None

    def _select(self, x: torch.Tensor, router_logits: torch.Tensor) -> SelectedTokens:
        topk_weights, topk_ids = select_experts(x, router_logits, self.rule)
        if self.physical_experts is not None:
            topk_ids = self.physical_experts(topk_ids)
        if self.weight_on_input:  # one expert per token: its weight may apply to the input
            x, topk_weights = x * topk_weights, torch.ones_like(topk_weights)
        return SelectedTokens(x, topk_weights, topk_ids)

    def _select_evenly(self, x: torch.Tensor) -> SelectedTokens:
        """Selects experts evenly for a step without requests, so that no rank overflows."""
        top_k, num_experts = self.rule.top_k, self.experts.num_experts
        ids = torch.arange(x.shape[0] * top_k, dtype=torch.int32, device=x.device) % num_experts
        return SelectedTokens(x, x.new_full((x.shape[0], top_k), 1 / top_k), ids.view(-1, top_k))


class SumsOfParts:
    """Collects the sums of a step's tokens, chunk by chunk, in one tensor."""

    whole: torch.Tensor  # [num_tokens, hidden_size]

    def __init__(self, tokens: torch.Tensor) -> None:
        """tokens: [num_tokens, hidden_size]; the sums have the same shape and dtype"""
        self._tokens = tokens
        self._end = 0

    def add(self, part: torch.Tensor) -> None:
        """Adds the sums of the next tokens; ignores padding after the last token."""
        begin, self._end = self._end, self._end + len(part)
        if begin == 0 and len(part) == len(self._tokens):
            self.whole = part
            return
        if begin == 0:
            self.whole = torch.empty_like(self._tokens)
        own = self.whole[begin : self._end]
        own.copy_(part[: len(own)])


def is_dummy_step() -> bool:
    """True if the step has no requests: it measures memory, or serves other DP ranks' requests."""
    return is_forward_context_available() and not get_forward_context().attn_metadata
