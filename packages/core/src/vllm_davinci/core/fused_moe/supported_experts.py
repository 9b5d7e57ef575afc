"""Checks, before weights are loaded, that this plugin and this device's operators support a layer's
routed experts."""

import dataclasses
import functools
from typing import TYPE_CHECKING

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from vllm_davinci.core.device.refusals import refusal_of
from vllm_davinci.core.errors import UnsupportedFeatureError
from vllm_davinci.core.fused_moe.local_experts import grouped_matmul
from vllm_davinci.core.fused_moe.router import RoutingRule, select_experts

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

_WITH_LIMIT = (MoEActivation.SILU, MoEActivation.SWIGLUOAI_UNINTERLEAVE)
_UNBIASED = (*_WITH_LIMIT, MoEActivation.SITU, MoEActivation.RELU2_NO_MUL)
# Rows and columns of the test products: small, and valid for all weight formats.
_SIDE = 32


def check_supported_experts(layer: "RoutedExperts") -> None:
    """Raises UnsupportedFeatureError, naming the layer, for unsupported experts."""
    # In vLLM, only gpt-oss experts have biases.
    known = (MoEActivation.SWIGLUOAI,) if layer.moe_config.has_bias else _UNBIASED
    biased = "with" if layer.moe_config.has_bias else "without"
    names = " and ".join(repr(each.value) for each in known)
    wants = {
        f"activation {layer.activation.value!r} (experts {biased} biases support {names})": (
            layer.activation not in known
        ),
        "a limit inside an activation other than SwiGLU": (
            layer.swiglu_limit is not None and layer.activation not in _WITH_LIMIT
        ),
        "weights on the input of more than one expert per token": (
            layer.apply_router_weight_on_input and layer.top_k > 1
        ),
    }
    if asked := [what for what, is_asked in wants.items() if is_asked]:
        raise UnsupportedFeatureError(
            f"{layer.layer_name} needs {' and '.join(asked)}, which vllm-davinci-core does not "
            "support. Choose another model."
        )
    rule, num_experts = RoutingRule.of_layer(layer), layer.moe_config.num_logical_experts
    bias = rule.correction_bias
    said = _refusal_of_selection(
        dataclasses.replace(rule, correction_bias=None),
        num_experts if bias is None else len(bias),  # longer with zero experts
        layer.params_dtype,
        None if bias is None else bias.dtype,
    )
    if said is not None:
        groups = rule.num_expert_group
        among = f" in {groups} groups" if groups > 1 else ""
        raise UnsupportedFeatureError(
            f"{layer.layer_name}: top-{rule.top_k} of {num_experts} experts{among} is not "
            "supported by the gating operator of this device and CANN. Choose another model. It "
            f"says: {said}"
        )
    said = _refusal_of_products(layer.local_num_experts, layer.params_dtype)
    if said is not None:
        raise UnsupportedFeatureError(
            f"{layer.layer_name} has {layer.local_num_experts} experts on each rank, which the "
            "grouped product of this device and CANN does not take. Divide them among more ranks:"
            " --enable-expert-parallel with a larger --tensor-parallel-size or "
            f"--data-parallel-size. It says: {said}"
        )


@functools.cache
def _refusal_of_selection(
    rule: RoutingRule, num_experts: int, dtype: torch.dtype, bias_dtype: torch.dtype | None
) -> str | None:
    """The operator's refusal, or None. rule: its bias is replaced by zeros of bias_dtype"""
    if rule.custom is not None or rule.is_composed:
        return None  # torch operators, which support every rule
    new = functools.partial(torch.zeros, device="npu")
    if bias_dtype is not None:
        rule = dataclasses.replace(rule, correction_bias=new(num_experts, dtype=bias_dtype))
    return refusal_of(
        lambda: select_experts(new(1, _SIDE, dtype=dtype), new(1, num_experts, dtype=dtype), rule)
    )


@functools.cache
def _refusal_of_products(num_local: int, dtype: torch.dtype) -> str | None:
    new = functools.partial(torch.zeros, device="npu")
    return refusal_of(
        lambda: grouped_matmul(
            new(1, _SIDE, dtype=dtype),
            new(num_local, _SIDE, _SIDE, dtype=dtype),
            new(num_local, dtype=torch.int64),
        )
    )
