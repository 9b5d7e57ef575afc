"""Experts that only a token's own rank can choose: by token id, or with its hidden state."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.fused_moe.router.zero_expert_router import ZeroExpertRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from vllm_davinci.core.fused_moe.router import RoutingRule, choose_experts, weights_of

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts


class ZeroExperts(ZeroExpertRouter):
    """vLLM's router of a layer with zero experts, which return their token unchanged.

    vLLM's runner adds the zero experts' share, `zero_expert_output`, to the sum over all ranks.
    shares: at index 0 the newest step's share, or the running ubatch's
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.shares: Any = [None]

    @classmethod
    def of_runner(cls, runner: MoERunner) -> "ZeroExperts":
        """Replaces the runner's router, which computes the share with Triton. Idempotent."""
        router = runner.router
        if isinstance(router, cls):
            return router
        assert isinstance(router, ZeroExpertRouter)
        runner.router = own = cls(
            top_k=router.top_k,
            global_num_experts=router.global_num_experts,
            e_score_correction_bias=router.e_score_correction_bias,
            num_logical_experts=router.num_logical_experts,
            zero_expert_type=router.zero_expert_type,
            scoring_func=router.scoring_func,
            renormalize=router.renormalize,
            routed_scaling_factor=router.routed_scaling_factor,
        )
        return own

    def take(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores the share of the zero experts, which have the numbers from num_logical_experts on.

        x: [num_tokens, hidden_size]; weights: [num_tokens, top_k], fp32; ids: the same, integers
        Returns weights and ids without zero experts, in the same shape: a zero expert gets weight 0
        and the number of another expert, evenly, so that no rank gets all such rows.
        """
        is_zero = ids >= self.num_logical_experts
        factor = weights.masked_fill(~is_zero, 0).sum(-1, keepdim=True)
        self.shares[0] = (x * factor).to(x.dtype)
        return weights.masked_fill(is_zero, 0), ids.remainder(self.num_logical_experts)

    @property
    def zero_expert_output(self) -> torch.Tensor | None:
        share: torch.Tensor | None = self.shares[0]
        self.shares[0] = None
        return share


@dataclass(frozen=True)
class OwnChoice:
    """Chooses the experts of a rank's own tokens, before dispatchers move them.

    rule:  the layer's, for router logits
    table: [vocab_size, top_k], int32: the experts of each token id; None if logits decide
    zero:  the layer's zero experts, whose logits come last; None without zero experts
    """

    rule: RoutingRule
    table: torch.Tensor | None
    zero: ZeroExperts | None

    @classmethod
    def of_layer(
        cls, layer: "RoutedExperts", runner: MoERunner | None, rule: RoutingRule
    ) -> "OwnChoice | None":
        """The layer's choice; None if every rank can choose. rule: with the final scaling factor"""
        table: torch.Tensor | None = getattr(layer, "hash_indices_table", None)
        zero = None
        if runner is not None and isinstance(runner.router, ZeroExpertRouter):
            zero = ZeroExperts.of_runner(runner)
        return None if table is None and zero is None else cls(rule, table, zero)

    def __call__(
        self, x: torch.Tensor, router_logits: torch.Tensor, input_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """The choice in the form of `RoutingRule.is_decided`: [num_tokens, 2 * top_k], fp32.

        x:         [num_tokens, hidden_size]
        input_ids: [num_tokens]; padding may have any value: values outside the table use its first
                   row
        """
        if self.table is None:
            weights, ids = choose_experts(router_logits, self.rule)
        else:
            assert input_ids is not None, "these experts are chosen by token ids"
            is_known = (input_ids >= 0) & (input_ids < self.table.shape[0])
            ids = self.table.index_select(0, input_ids.masked_fill(~is_known, 0))
            weights = weights_of(router_logits, ids, self.rule)
        weights = weights.float()
        if self.zero is not None:
            weights, ids = self.zero.take(x, weights, ids)
        return torch.cat([weights, ids.float()], dim=-1)
