"""Routed experts as vLLM's runner calls them: a base for all precisions, and float experts."""

import dataclasses
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch_npu
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)

from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.device.soc import soc_of
from vllm_davinci.core.fused_moe.communication import CommunicationRule, RoutedSizes
from vllm_davinci.core.fused_moe.dispatcher.row_counts import CountsWait
from vllm_davinci.core.fused_moe.dispatcher_selector import DispatcherSelector, dispatcher_selector
from vllm_davinci.core.fused_moe.forward import FusedMoEForward
from vllm_davinci.core.fused_moe.gated_activation import GatedActivation
from vllm_davinci.core.fused_moe.layer import NPURoutedExperts
from vllm_davinci.core.fused_moe.local_experts import Experts, FloatExperts, grouped_matmul
from vllm_davinci.core.fused_moe.own_choice import OwnChoice
from vllm_davinci.core.fused_moe.replicas import ReplicaTable
from vllm_davinci.core.fused_moe.router import RoutingRule
from vllm_davinci.core.fused_moe.shared_experts import shared_experts_overlap

# Experts with biases and a clipped SwiGLU (gpt-oss).

# From vLLM's SwigluOAIAndMul, which does not read them from the model's configuration.
ALPHA, LIMIT = 1.702, 7.0


@dataclass(frozen=True, kw_only=True)
class BiasedExperts(Experts):
    """Unquantized experts of gate * sigmoid(1.702 gate) * (up + 1), both clipped at 7.

    gate_up:      [num_local, hidden_size, 2 * intermediate_size], gate at even, up at odd columns
    gate_up_bias: [num_local, 2 * intermediate_size]
    down:         [num_local, intermediate_size, hidden_size]
    down_bias:    [num_local, hidden_size], zeros on all but one of the ranks that share experts
    Biases are fp32 for weights in bf16, as the grouped product requires.
    """

    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor
    down: torch.Tensor
    down_bias: torch.Tensor

    def _compute(
        self, rows: torch.Tensor, tokens_per_expert: torch.Tensor, scales: torch.Tensor | None
    ) -> torch.Tensor:
        """See Experts.__call__. Three launches."""
        gate_up = grouped_matmul(rows, self.gate_up, tokens_per_expert, bias=[self.gate_up_bias])
        activated = torch_npu.npu_clipped_swiglu(
            gate_up, alpha=ALPHA, limit=LIMIT, bias=1.0, interleaved=True
        )
        return grouped_matmul(activated, self.down, tokens_per_expert, bias=[self.down_bias])


def bias_for_products(parameter: torch.nn.Parameter) -> torch.Tensor:
    """A loaded bias in the dtype that the grouped product requires for weights of its dtype.

    The parameter becomes that tensor, so that biases are reloaded into it.
    """
    if parameter.dtype == torch.bfloat16:
        parameter.data = parameter.data.float()
    return parameter.data


@dataclass(frozen=True, kw_only=True)
class UngatedExperts(Experts):
    """Unquantized experts of relu(x up)^2 down.

    up:   [num_local, hidden_size, intermediate_size]
    down: [num_local, intermediate_size, hidden_size]
    """

    up: torch.Tensor
    down: torch.Tensor

    def _compute(
        self, rows: torch.Tensor, tokens_per_expert: torch.Tensor, scales: torch.Tensor | None
    ) -> torch.Tensor:
        """See Experts.__call__. Four launches."""
        activated = grouped_matmul(rows, self.up, tokens_per_expert).relu_().square()
        return grouped_matmul(activated, self.down, tokens_per_expert)


if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts


class NPUFusedMoEMethodBase(FusedMoEMethodBase):
    """Computes routed experts from router logits: selects experts, moves tokens and multiplies."""

    moe_forward: FusedMoEForward | None = None
    _own_choice: OwnChoice | None = None
    _factor_of_sum = 1.0

    is_monolithic = True
    supports_internal_mk = True
    """True: vLLM's runner leaves it to this method to get tokens of other DP ranks."""
    supports_eplb = True
    """Experts may move between ranks; see `NPURoutedExperts.get_expert_weights`."""

    @property
    def mk_can_overlap_shared_experts(self) -> bool:
        """True if `moe_forward` also runs the shared experts, so that vLLM's runner does not."""
        return self.moe_forward is not None and self.moe_forward.shared is not None

    @abstractmethod
    def _experts(self, layer: NPURoutedExperts, **place: Any) -> Experts:
        """The experts of a layer with loaded tensors; place: first, num_local, num_experts,
        activation"""

    def process_weights_after_loading(self, layer: "RoutedExperts") -> None:
        """Lays the weights out for grouped products and prepares the forward."""
        super().process_weights_after_loading(layer)
        assert isinstance(layer, NPURoutedExperts)
        experts = self._experts(
            layer,
            first=layer.local_num_experts * layer.moe_config.ep_rank,
            num_local=layer.local_num_experts,
            num_experts=layer.global_num_experts,
            activation=GatedActivation.of_layer(layer),
        )
        runner = _runner(layer)
        rule = RoutingRule.of_layer(layer)
        self._factor_of_sum *= _take_factor_of_sum(rule, layer, runner)
        rule = dataclasses.replace(rule, scaling_factor=rule.scaling_factor * self._factor_of_sum)
        self._own_choice = OwnChoice.of_layer(layer, runner, rule)
        self.moe_forward = FusedMoEForward(
            rule=dataclasses.replace(rule, is_decided=self._own_choice is not None),
            experts=experts,
            physical_experts=_replica_table(layer),
            weight_on_input=layer.apply_router_weight_on_input,
            dispatchers=_dispatchers(layer),
            shared=shared_experts_overlap(layer),
        )

    def apply_monolithic(
        self,
        layer: "RoutedExperts",
        x: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See FusedMoEForward. input_ids: [num_tokens], for experts that are chosen by token id"""
        assert self.moe_forward is not None
        if self._own_choice is not None:
            router_logits = self._own_choice(x, router_logits, input_ids)
        return self.moe_forward(x, router_logits)


class NPUUnquantizedFusedMoEMethod(NPUFusedMoEMethodBase, UnquantizedFusedMoEMethod):
    """Experts in the model's dtype."""

    def process_weights_after_loading(self, layer: "RoutedExperts") -> None:
        """Prepares the forward, once: it reads the tensors into which weights are reloaded."""
        if self.moe_forward is None:
            super().process_weights_after_loading(layer)

    def _experts(self, layer: NPURoutedExperts, **place: Any) -> Experts:
        gate_up = transposed_in_memory(layer.w13_weight)
        down = transposed_in_memory(layer.w2_weight)
        if layer.moe_config.has_bias:
            return BiasedExperts(
                gate_up=gate_up,
                gate_up_bias=bias_for_products(layer.w13_bias),
                down=down,
                down_bias=bias_for_products(layer.w2_bias),
                **place,
            )
        if not layer.moe_config.is_act_and_mul:
            return UngatedExperts(up=gate_up, down=down, **place)
        return FloatExperts(gate_up=gate_up, down=down, **place)


def _runner(layer: NPURoutedExperts) -> MoERunner | None:
    """vLLM's runner of the layer; None if a test calls the layer directly."""
    layers = get_current_vllm_config().compilation_config.static_forward_context
    runner = layers.get(layer.layer_name)
    return runner if isinstance(runner, MoERunner) else None


def _take_factor_of_sum(
    rule: RoutingRule, layer: NPURoutedExperts, runner: MoERunner | None
) -> float:
    """Lets the rule scale each token's weights by the factor by which vLLM's runner would multiply
    the routed experts' sum, which saves a launch over all rows. Sets the runner's factor to 1.
    Returns the factor for the rule, or 1 if the runner keeps it.

    In float16 the runner divides the shared experts' sum instead, so that no value overflows.
    """
    takes_factor = rule.custom is None and not rule.is_plain
    if not takes_factor or runner is None or layer.moe_config.in_dtype == torch.float16:
        return 1.0
    factor, runner.routed_scaling_factor = runner.routed_scaling_factor, 1.0
    return factor


def _replica_table(layer: NPURoutedExperts) -> ReplicaTable | None:
    """The table of replicas; None if experts are in order and never move."""
    physical_to_logical = layer.expert_map_manager.physical_to_logical()
    num_experts = layer.moe_config.num_logical_experts
    stays = not layer.moe_config.moe_parallel_config.enable_eplb
    if stays and physical_to_logical == list(range(num_experts)):
        return None
    vllm_config = get_current_vllm_config()
    parallel = vllm_config.parallel_config
    # Slices, one per TP rank of a DP rank, are padded to the same size.
    of_dp_rank = vllm_config.scheduler_config.max_num_batched_tokens + parallel.tensor_parallel_size
    return ReplicaTable(
        physical_to_logical,
        num_experts,
        layer.w2_weight.device,
        max_rows=parallel.data_parallel_size * of_dp_rank,
    )


def _dispatchers(layer: NPURoutedExperts) -> DispatcherSelector | None:
    vllm_config = get_current_vllm_config()
    config = get_config(vllm_config)
    return dispatcher_selector(
        CommunicationRule.of_engine(
            vllm_config,
            config,
            soc_of(torch_npu.npu.get_device_name()),
            layer.moe_config.in_dtype,
            RoutedSizes(
                layer.moe_config.hidden_dim,
                layer.moe_config.num_experts,
                layer.moe_config.experts_per_token,
            ),
        ),
        layer.moe_config.is_sequence_parallel,
        get_tp_group().rank_in_group,
        CountsWait(layer.layer_name),
        config.dbo.num_ubatches,
    )


def transposed_in_memory(parameter: torch.nn.Parameter) -> torch.Tensor:
    """A loaded weight [experts, n, k] as contiguous [experts, k, n], which the product reads.

    The parameter keeps its shape as a view of this memory, so that weights are reloaded into it.
    """
    weight = parameter.data.transpose(1, 2).contiguous()
    parameter.data = weight.transpose(1, 2)
    return weight
