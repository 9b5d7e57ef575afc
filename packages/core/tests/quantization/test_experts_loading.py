"""Tensors of quantized experts that are missing or do not fit are named at load."""

import pytest
import torch
from torch import Tensor

from vllm_davinci.core.errors import CheckpointError
from vllm_davinci.core.quantization.experts_loading import ExpertTensorLoader
from vllm_davinci.core.quantization.scheme import find_scheme


def test_gate_and_up_of_one_expert_must_have_one_input_scale():
    loader = loader_of("w13", "input_scale")
    param = torch.nn.Parameter(torch.zeros(2, 1), requires_grad=False)
    for shard, value in (("w1", 0.5), ("w3", 0.25)):
        loader(param, torch.tensor([value]), "w13_input_scale", shard, 1, return_success=True)
    with pytest.raises(
        CheckpointError, match=r"expert 1 is 0\.5 for gate_proj and 0\.25 for up_proj"
    ):
        loader.require_agreement()


# --- loading -----------------------------------------------------------------------------------

INT8 = torch.ones(4, 4, dtype=torch.int8)


def loader_of(group: str, name: str) -> ExpertTensorLoader:
    spec = next(spec for spec in find_scheme("W8A8", "p").parameters if spec.name == name)
    tensor = f"mlp.experts.{group}_{name}"
    return ExpertTensorLoader(load_into_one_place, tensor, spec, torch.bfloat16)


def load_into_one_place(
    param: Tensor, loaded: Tensor, name: str, shard: str, expert: int, return_success: bool
) -> bool:
    """Loads like vLLM: skips experts of other ranks, and requires fitting shapes."""
    if expert >= 2:
        return False
    param[expert].copy_(loaded)
    return True


def test_missing_parts_of_experts_are_counted():
    loader = loader_of("w13", "weight")
    param = torch.nn.Parameter(torch.zeros(2, 4, 4), requires_grad=False)
    for expert in range(4):
        for shard in ("w1", "w3"):
            if (expert, shard) != (1, "w3"):
                done = loader(param, INT8, "w13_weight", shard, expert, True)
                assert done == (expert < 2)
    assert loader.missing(2, ("w1", "w3")) == "mlp.experts.w13_weight (1 of 4 parts)"
    loader(param, INT8, "w13_weight", "w3", 1, return_success=True)
    assert loader.missing(2, ("w1", "w3")) is None


def test_an_expert_of_another_shape_is_named():
    loader = loader_of("w2", "weight")
    param = torch.nn.Parameter(torch.zeros(2, 4, 4), requires_grad=False)
    with pytest.raises(
        CheckpointError, match=r"mlp\.experts\.w2_weight of expert 1, part w2.*\[9\]"
    ):
        loader(param, torch.ones(9, dtype=torch.int8), "w2_weight", "w2", 1, return_success=True)


@pytest.mark.parametrize("name", ["weight", "quant_bias", "input_scale"])
def test_an_expert_s_tensor_of_another_dtype_is_named(name: str):
    loader = loader_of("w13", name)
    param = torch.nn.Parameter(torch.zeros(2, 4, 4), requires_grad=False)
    stored = torch.ones(4, 4, dtype=torch.bfloat16 if name != "input_scale" else torch.int8)
    with pytest.raises(
        CheckpointError,
        match=rf"w13_{name} of expert 0, part w1, holds \w+ in the checkpoint and must hold",
    ):
        loader(param, stored, f"w13_{name}", "w1", 0, return_success=True)
    assert not param.any()
