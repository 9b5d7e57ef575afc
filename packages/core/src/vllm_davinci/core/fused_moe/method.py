"""Routed experts without quantization, as vLLM's runner calls them."""

from typing import TYPE_CHECKING

import torch
import torch_npu
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)

from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.device.soc import soc_of
from vllm_davinci.core.errors import UnsupportedFeatureError
from vllm_davinci.core.fused_moe.exchange import TokenExchange, exchange_between_ranks
from vllm_davinci.core.fused_moe.experts import Experts, FloatExperts
from vllm_davinci.core.fused_moe.forward import RoutedForward
from vllm_davinci.core.fused_moe.layer import NPURoutedExperts
from vllm_davinci.core.fused_moe.options import scheme_rule
from vllm_davinci.core.fused_moe.router import RoutingRule
from vllm_davinci.core.fused_moe.row_counts import CountsWait
from vllm_davinci.core.fused_moe.shared_experts import shared_beside

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts


class NPUUnquantizedFusedMoEMethod(UnquantizedFusedMoEMethod):
    """Takes the router's logits: choosing experts, moving tokens and computing are all here."""

    routed_forward: RoutedForward | None = None

    @property
    def is_monolithic(self) -> bool:
        return True

    @property
    def supports_internal_mk(self) -> bool:
        """Tokens of other DP ranks are fetched here, not by vLLM's runner."""
        return True

    @property
    def mk_can_overlap_shared_experts(self) -> bool:
        """Whether `routed_forward` runs the shared experts too, so that vLLM's runner must not."""
        return self.routed_forward is not None and self.routed_forward.shared is not None

    def process_weights_after_loading(self, layer: "RoutedExperts") -> None:
        """Lays the weights out for the grouped product and prepares the forward."""
        super().process_weights_after_loading(layer)
        check_computable(layer)
        assert isinstance(layer, NPURoutedExperts)
        self.routed_forward = routed_forward(
            layer,
            FloatExperts(
                gate_up=transposed_in_memory(layer.w13_weight),
                down=transposed_in_memory(layer.w2_weight),
                first=layer.local_num_experts * layer.moe_config.ep_rank,
                num_local=layer.local_num_experts,
                num_experts=layer.global_num_experts,
            ),
        )

    def apply_monolithic(
        self,
        layer: "RoutedExperts",
        x: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See RoutedForward."""
        assert self.routed_forward is not None
        return self.routed_forward(x, router_logits)


def routed_forward(layer: NPURoutedExperts, experts: Experts) -> RoutedForward:
    """The forward of a layer whose weights are loaded, with experts in any precision."""
    physical = layer.expert_map_manager.physical_experts()
    if physical is not None:
        physical = physical.to(layer.w2_weight.device)
    return RoutedForward(
        rule=RoutingRule.of_layer(layer),
        experts=experts,
        physical_experts=physical,
        weight_on_input=layer.apply_router_weight_on_input,
        exchange=_exchange(layer),
        shared=shared_beside(layer),
    )


def _exchange(layer: NPURoutedExperts) -> TokenExchange | None:
    vllm_config = get_current_vllm_config()
    return exchange_between_ranks(
        scheme_rule(
            vllm_config,
            get_config(vllm_config),
            soc_of(torch_npu.npu.get_device_name()),
            layer.moe_config.in_dtype,
            layer.moe_config.hidden_dim,
        ),
        layer.moe_config.is_sequence_parallel,
        get_tp_group().rank_in_group,
        CountsWait.of_layer(layer.layer_name, vllm_config),
    )


def check_computable(layer: "RoutedExperts") -> None:
    """Raises UnsupportedFeatureError for experts that the grouped operators do not compute."""
    wants = {
        f"activation {layer.activation.value!r} (only 'silu' is known)": (
            layer.activation is not MoEActivation.SILU
        ),
        "biases in its experts": layer.moe_config.has_bias,
        "a limit inside SwiGLU": layer.swiglu_limit is not None,
        "weights on the input of more than one expert per token": (
            layer.apply_router_weight_on_input and layer.top_k > 1
        ),
    }
    if asked := [what for what, is_asked in wants.items() if is_asked]:
        raise UnsupportedFeatureError(
            f"{layer.layer_name} needs {' and '.join(asked)}, which vllm-davinci-core does not "
            "compute. Choose another model."
        )


def transposed_in_memory(parameter: torch.nn.Parameter) -> torch.Tensor:
    """A loaded weight [experts, n, k] as [experts, k, n], contiguous, which the product reads.

    The parameter keeps its shape, as a view of the same memory, so that weights loaded into it
    again arrive here.
    """
    weight = parameter.data.transpose(1, 2).contiguous()
    parameter.data = weight.transpose(1, 2)
    return weight
