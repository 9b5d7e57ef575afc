"""One mixture-of-experts layer on this rank, from the router's logits to the routed sum."""

from dataclasses import dataclass

import torch
from vllm.forward_context import get_forward_context, is_forward_context_available

from vllm_davinci.core.fused_moe.beside import ALONE, Beside
from vllm_davinci.core.fused_moe.exchange import TokenExchange
from vllm_davinci.core.fused_moe.experts import Experts
from vllm_davinci.core.fused_moe.router import RoutingRule, select_experts
from vllm_davinci.core.fused_moe.shared_experts import SharedBeside


@dataclass(frozen=True)
class RoutedForward:
    """What a layer does with its tokens once its weights are loaded.

    physical_experts: [num_experts], int32, on the device: each expert's number by place; None
                      when experts lie in order
    shared:           runs the layer's shared experts beside this; None leaves them to vLLM
    """

    rule: RoutingRule
    experts: Experts
    physical_experts: torch.Tensor | None
    weight_on_input: bool = False
    exchange: TokenExchange | None = None
    shared: SharedBeside | None = None

    def __call__(self, x: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        """This rank's part of the routed experts' sum; the sum over ranks is the layer's output.

        x: [num_tokens, hidden_size]; router_logits: [num_tokens, num_experts]
        Returns a new tensor shaped like x.
        """
        if self.shared is not None:
            return self.shared(x, lambda beside: self._routed(x, router_logits, beside))
        return self._routed(x, router_logits, ALONE)

    def _routed(self, x: torch.Tensor, router_logits: torch.Tensor, beside: Beside) -> torch.Tensor:
        if self.exchange is not None:
            return self.exchange(x, router_logits, self, beside)
        at_once = self._at_once(x, router_logits) if beside is ALONE else None
        if at_once is not None:
            return at_once
        chosen = self.route(x, router_logits)
        beside.chosen()
        return self.compute(x, *chosen, beside)

    def _at_once(self, x: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor | None:
        """`route` and `compute` in one call, or None when no compiled operator can do both."""
        rule, experts = self.rule, self.experts
        if self.physical_experts is not None or self.weight_on_input or not rule.is_one_launch:
            return None
        stage = experts.stage_of_logits(x.dtype)
        if stage is None:
            return None
        return stage.operator(
            x,
            router_logits,
            rule.correction_bias,
            *stage.weights,
            rule.top_k,
            rule.num_groups,
            rule.num_chosen_groups,
            rule.scoring == "sigmoid",
            rule.scaling_factor,
            experts.first,
            experts.num_experts,
        )

    def route(
        self, x: torch.Tensor, router_logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and physical experts of each token: [num_tokens, top_k] both."""
        topk_weights, topk_ids = select_experts(x, router_logits, self.rule)
        if self.physical_experts is not None:
            topk_ids = self.physical_experts[topk_ids.to(torch.int64)]
        return topk_weights, topk_ids

    def choose(
        self, x: torch.Tensor, router_logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`route`; in a step without requests, evenly, so that no rank is overrun."""
        if not is_forward_context_available() or get_forward_context().attn_metadata:
            return self.route(x, router_logits)
        top_k, num_experts = self.rule.top_k, self.experts.num_experts
        ids = torch.arange(x.shape[0] * top_k, dtype=torch.int32, device=x.device) % num_experts
        return x.new_full((x.shape[0], top_k), 1 / top_k), ids.view(-1, top_k)

    def compute(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        beside: Beside = ALONE,
    ) -> torch.Tensor:
        """The expert stage of tokens that are all here."""
        if self.weight_on_input:  # one expert per token: its weight may come before it
            x, topk_weights = x * topk_weights, torch.ones_like(topk_weights)
        return self.experts.routed(x, topk_weights, topk_ids, beside)
