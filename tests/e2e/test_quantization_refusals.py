"""Starting with a bad int8 checkpoint, or none, fails and names the remedy."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_davinci.core.quantization.config import DESCRIPTION
from vllm_davinci_testing.engines.engine_process import EngineError
from vllm_davinci_testing.engines.int8_checkpoint import rewrite, tensors_of

BF16 = {"dtype": "bfloat16", "max_model_len": 512}

Quantize = Callable[..., Path]


def spoilt(directory: Path, tensor: str, type_name: str | None) -> Path:
    """Removes a tensor from a checkpoint, or changes the type in its description."""
    tensors = tensors_of(directory)
    description = json.loads((directory / DESCRIPTION).read_text())
    if type_name is None:
        del tensors[tensor]
    else:
        description[tensor] = type_name
    rewrite(directory, tensors, description)
    return directory


EXPERT = "model.layers.2.mlp.experts.5"


@pytest.mark.parametrize(
    ("tensor", "type_name", "told"),
    [
        (f"{EXPERT}.up_proj.weight_scale", None, f"{EXPERT}.up_proj.weight_scale: is missing"),
        (f"{EXPERT}.up_proj.weight", "FLOAT", f"{EXPERT}.up_proj FLOAT"),
        (
            "model.layers.1.input_layernorm.bias",
            "W8A8_DYNAMIC",
            "model.layers.1.input_layernorm.bias: 1 tensors have an entry in the description and",
        ),
    ],
)
def test_a_bad_checkpoint_ends_the_start_with_its_tensor_named(
    tensor, type_name, told, quantize, tiny_deepseek, start_engine
):
    # Only the name distinguishes this directory.
    name = f"bad-{tensor.replace('.', '-')}-{type_name}"
    model = spoilt(quantize(tiny_deepseek, "W8A8_DYNAMIC", name=name), tensor, type_name)
    with pytest.raises(EngineError) as error:
        start_engine(model, **BF16)
    assert told in str(error.value)


def test_the_option_on_a_float_checkpoint_says_how_to_make_one(tiny_llama, start_engine):
    with pytest.raises(
        EngineError, match=r"needs quant_model_description\.json next to the weights"
    ):
        start_engine(tiny_llama, quantization="ascend", **BF16)
