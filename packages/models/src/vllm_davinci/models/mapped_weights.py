"""Loads tensors after vLLM's WeightsMapper has turned their names into parameters' names."""

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe import fused_moe_make_expert_params_mapping
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.utils import is_pp_missing_parameter

# The part of a released name that identifies the tensor of a routed expert.
EXPERT_PART = re.compile(r"(?<!shared_)experts\.\d+\.w[123]\.")


def load_mapped(
    model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]], num_experts: int
) -> set[str]:
    """Loads tensors into a model whose routed experts are released as w1, w2 and w3.

    Returns the names of the parameters. Skips those of other pipeline stages.
    """
    parameters, loaded = dict(model.named_parameters()), set()
    experts = {
        part: (target, *place) for target, part, *place in expert_mapping(model, num_experts)
    }
    for name, tensor in weights:
        if is_pp_missing_parameter(name, model):
            continue
        if (found := EXPERT_PART.search(name)) is not None:
            target, expert, shard = experts[found.group()]
            name = name.replace(found.group(), str(target))
            parameter: Any = parameters[name]
            options = {"expert_id": expert, "shard_id": shard, "return_success": True}
            if parameter.weight_loader(parameter, tensor, name, **options):
                loaded.add(name)
            continue
        parameter = parameters[name]
        load: Any = getattr(parameter, "weight_loader", default_weight_loader)
        shard = getattr(tensor, "shard_id", None)
        load(parameter, tensor, *(() if shard is None else (shard,)))
        loaded.add(name)
    return loaded


def expert_mapping(model: nn.Module, num_experts: int) -> list[tuple[str, str, int, str]]:
    """Parameter, released name, expert and part of each tensor of the routed experts."""
    mapping: list[tuple[str, str, int, str]] = fused_moe_make_expert_params_mapping(
        model,
        ckpt_gate_proj_name="w1",
        ckpt_down_proj_name="w2",
        ckpt_up_proj_name="w3",
        num_experts=num_experts,
    )
    return mapping
