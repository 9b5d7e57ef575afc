"""Selects each token's experts and weights: one launch for the usual rules."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch_npu

from vllm_davinci.core.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

# norm_type and group_select_mode of npu_moe_gating_top_k.
NORM_SOFTMAX, NORM_SIGMOID = 0, 1
GROUP_SCORE_MAX, GROUP_SCORE_TOP2_SUM = 0, 1

SQRT_SOFTPLUS = "sqrtsoftplus"
# Functions from logits to scores, by their names in configurations.
SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda logits: logits.softmax(dim=-1),
    "sigmoid": torch.sigmoid,
    SQRT_SOFTPLUS: lambda logits: torch.nn.functional.softplus(logits).pow(0.5),
}
# Added to the sum of weights before dividing by it, in torch's operators.
SMALLEST_SUM = 1e-20

# (x, router_logits, top_k, renormalize) -> (weights, expert ids)
CustomRouting = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class RoutingRule:
    """A model's rule for choosing experts.

    scoring:         one of SCORES, over the router's logits
    renormalize:     the chosen experts' weights sum to one, before scaling
    num_expert_group, topk_group: experts are chosen within the best groups only; 1, 1 without
                                  groups
    correction_bias: [num_experts], added to the scores for the choice, not for the weights
    custom:          the model's own function, instead of all of the above
    is_decided:      weights and experts, [num_tokens, 2 * top_k], replace the logits: see
                     `own_choice.OwnChoice`
    """

    top_k: int
    scoring: str = "softmax"
    renormalize: bool = True
    num_expert_group: int = 1
    topk_group: int = 1
    scaling_factor: float = 1.0
    correction_bias: torch.Tensor | None = None
    custom: CustomRouting | None = None
    is_decided: bool = False

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the compiled operators that choose experts."""
        return {
            "correction_bias": self.correction_bias,
            "top_k": self.top_k,
            "num_groups": self.num_expert_group,
            "num_chosen_groups": self.topk_group,
            "is_sigmoid": self.scoring == "sigmoid",
            "scaling_factor": self.scaling_factor,
        }

    @classmethod
    def of_layer(cls, layer: "RoutedExperts") -> "RoutingRule":
        """The rule that vLLM's model gave its layer."""
        if layer.scoring_func not in SCORES:
            raise UnsupportedFeatureError(
                f"{layer.layer_name} scores experts by {layer.scoring_func!r}. Known are "
                f"{', '.join(map(repr, SCORES))}; choose another model."
            )
        grouped = layer.use_grouped_topk
        bias = layer.e_score_correction_bias
        by_table = getattr(layer, "hash_indices_table", None) is not None
        # vLLM scales only with groups, a bias, a table or this scoring.
        scaled = grouped or bias is not None or by_table or layer.scoring_func == SQRT_SOFTPLUS
        return cls(
            top_k=layer.top_k,
            scoring=layer.scoring_func,
            renormalize=layer.renormalize,
            num_expert_group=layer.num_expert_group or 1 if grouped else 1,
            topk_group=layer.topk_group or 1 if grouped else 1,
            scaling_factor=layer.routed_scaling_factor if scaled else 1.0,
            correction_bias=None if bias is None else bias.detach().as_subclass(torch.Tensor),
            custom=layer.custom_routing_function,
        )

    @property
    def is_plain(self) -> bool:
        """True if scores alone decide: no groups, bias or factor."""
        return (
            not self.is_composed
            and self.num_expert_group == 1
            and self.correction_bias is None
            and self.scaling_factor == 1.0
        )

    @property
    def is_composed(self) -> bool:
        """True if no operator supports the rule, so that torch's operators compute it."""
        return self.is_decided or self.scoring == SQRT_SOFTPLUS

    @property
    def is_one_launch(self) -> bool:
        """True if the operators return weights and experts as the model defines them.

        They always renormalize sigmoid scores, and softmax scores only if the rule is plain.
        """
        if self.custom is not None or self.is_composed:
            return False
        return self.renormalize == (self.scoring == "sigmoid" or self.is_plain)


def select_experts(
    x: torch.Tensor, router_logits: torch.Tensor, rule: RoutingRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """Selects the experts of each token, best first.

    x:             [num_tokens, hidden_size]; its dtype becomes the weights'
    router_logits: [num_tokens, num_experts], fp32, bf16 or fp16; or the choice (`is_decided`)
    Returns weights [num_tokens, top_k] with x's dtype and ids [num_tokens, top_k], int32.
    Scores are computed in fp32; among equal scores the lower number wins. A NaN in one token's
    logits changes only that token's choice.
    Source: Huang et al. DeepSeek-V3 technical report, 2.1.2; vLLM's grouped_topk.
    """
    if rule.custom is not None:
        weights, ids = rule.custom(
            hidden_states=x,
            gating_output=router_logits,
            topk=rule.top_k,
            renormalize=rule.renormalize,
        )
        return weights.to(x.dtype), ids.to(torch.int32)
    if rule.is_decided:
        weights, ids = router_logits.chunk(2, dim=-1)
        return weights.to(x.dtype), ids.to(torch.int32)
    weights, ids = choose_experts(router_logits, rule)
    return weights if weights.dtype == x.dtype else weights.to(x.dtype), ids


def choose_experts(
    router_logits: torch.Tensor, rule: RoutingRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """See select_experts; weights keep the dtype that they are computed in."""
    bias = rule.correction_bias
    if bias is not None and bias.dtype != router_logits.dtype:
        router_logits = router_logits.to(bias.dtype)
    if rule.scoring == SQRT_SOFTPLUS:
        scores = SCORES[rule.scoring](router_logits.float())
        choice = scores if bias is None else scores + bias
        ids = choice.topk(rule.top_k, dim=-1).indices
        return _scaled(scores, ids, rule), ids.to(torch.int32)
    if rule.is_plain and rule.scoring == "softmax":
        # The softmax over the chosen logits equals the renormalized softmax over all logits.
        weights, ids, _ = torch_npu.npu_moe_gating_top_k_softmax_v2(
            router_logits, k=rule.top_k, renorm=int(rule.renormalize)
        )
        return weights, ids
    return _gating_top_k(router_logits, rule)


def weights_of(router_logits: torch.Tensor, ids: torch.Tensor, rule: RoutingRule) -> torch.Tensor:
    """Weights, [num_tokens, top_k], fp32, of experts that have already been chosen.

    ids: [num_tokens, top_k], integers
    """
    return _scaled(SCORES[rule.scoring](router_logits.float()), ids.to(torch.int64), rule)


def _gating_top_k(
    router_logits: torch.Tensor, rule: RoutingRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses experts with one operator that computes scores, groups, biases and scaling."""
    sigmoid = rule.scoring == "sigmoid"
    # The operator always renormalizes sigmoid scores and never softmax scores: for other models
    # weights are computed here.
    weights_fit = rule.renormalize == sigmoid
    weights, ids, scores = torch_npu.npu_moe_gating_top_k(
        router_logits,
        rule.top_k,
        bias=rule.correction_bias,
        k_group=rule.topk_group,
        group_count=rule.num_expert_group,
        group_select_mode=GROUP_SCORE_MAX if rule.correction_bias is None else GROUP_SCORE_TOP2_SUM,
        norm_type=NORM_SIGMOID if sigmoid else NORM_SOFTMAX,
        out_flag=not weights_fit,
        routed_scaling_factor=rule.scaling_factor,
    )
    if weights_fit:
        return weights, ids
    chosen = scores.gather(-1, ids.to(torch.int64))
    if rule.renormalize:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    return chosen * rule.scaling_factor, ids


def _scaled(scores: torch.Tensor, ids: torch.Tensor, rule: RoutingRule) -> torch.Tensor:
    weights = scores.gather(-1, ids)
    if rule.renormalize:
        weights = weights / weights.sum(-1, keepdim=True).add_(SMALLEST_SUM)
    return weights * rule.scaling_factor
