"""Dispatch methods in a dry-run: passes their rows to the timing model, and tries any method.

A dry-run computes nothing, so no operator knows how many of its allocated rows are in use. Each
layer therefore passes that share, by the step's dispatch method, to the timing model.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from vllm_davinci.core.fused_moe.communication import Choice, CommunicationMethod, CommunicationRule
from vllm_davinci.core.fused_moe.dispatcher.all_to_all import AllToAllDispatcher
from vllm_davinci.core.fused_moe.dispatcher.all_to_all_fixed import FixedAllToAllDispatcher
from vllm_davinci.core.fused_moe.dispatcher_selector import DispatcherSelector
from vllm_davinci.core.fused_moe.method import NPUFusedMoEMethodBase
from vllm_davinci.core.fused_moe.method_costs import MethodCosts
from vllm_davinci.planner.dry_run.layout import Layout
from vllm_davinci.vnpu.timing import set_routed_share


@dataclass
class TriedMethod:
    """The dispatch method that all layers use.

    method: the method; None for the engine's choice
    rule:   rule of that choice; None if tokens stay on their ranks
    costs:  step times that replace those of the engine's rule
    """

    method: CommunicationMethod | None = None
    rule: CommunicationRule | None = None
    costs: MethodCosts | None = None


@dataclass(frozen=True, kw_only=True)
class PricedSelector(DispatcherSelector):
    """Selects a layer's dispatcher and passes its share of rows to the timing model.

    layout:    layout of the whole group
    num_local: experts of a rank, of which a token selects up to top_k
    tried:     shared by all layers
    """

    layout: Layout
    top_k: int
    num_local: int
    tried: TriedMethod

    def of_step(self, num_tokens: int) -> Any:
        dispatcher = super().of_step(num_tokens)
        set_routed_share(*self._share(dispatcher))
        return dispatcher

    def _share(self, dispatcher: Any) -> tuple[int, int]:
        ranks = self.rule.layout.ep_size
        if isinstance(dispatcher, FixedAllToAllDispatcher):
            # A part has room for one row per token and expert that the token can select on the
            # rank.
            rows, room = self.top_k, ranks * min(self.top_k, self.num_local)
            numerator, denominator = self.layout.routed_share(1)
            return numerator * rows, denominator * room
        # All-to-alls allocate a rank's own rows; the other methods allocate those of all ranks.
        return self.layout.routed_share(1 if isinstance(dispatcher, AllToAllDispatcher) else ranks)

    def _choose(self, max_tokens: int) -> Choice:
        if self.tried.method is None:
            if self.tried.costs is None:
                return super()._choose(max_tokens)
            knowing = replace(self, rule=replace(self.rule, costs=self.tried.costs))
            return DispatcherSelector._choose(knowing, max_tokens)
        return Choice(self.tried.method, "a dry-run tries it")


def price_dispatch(model: torch.nn.Module, layout: Layout) -> TriedMethod:
    """Makes every MoE layer of a model use PricedSelector. Returns their shared TriedMethod."""
    tried = TriedMethod()
    module: Any
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if not isinstance(method, NPUFusedMoEMethodBase) or method.moe_forward is None:
            continue
        if (shared := method.moe_forward.shared) is not None:
            shared.decide_by_names()
        selector = method.moe_forward.dispatchers
        if selector is None:
            continue
        tried.rule = selector.rule
        priced = PricedSelector(
            **{each.name: getattr(selector, each.name) for each in fields(selector)},
            layout=layout,
            top_k=module.moe_config.experts_per_token,
            num_local=module.local_num_experts,
            tried=tried,
        )
        method.moe_forward = replace(method.moe_forward, dispatchers=priced)
    return tried
