"""check-model's report on compressed-tensors checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_davinci.core.checkpoint.check import check_checkpoint
from vllm_davinci.core.weight_files.issues import CheckReport

HIDDEN, INTER, VOCABULARY = 8, 12, 16


def problems(report: CheckReport) -> str:
    return "\n".join(f"{one.subject}: {one.what}" for one in report.issues)


# --- compressed-tensors --------------------------------------------------------------------------

ARGUMENTS = {"num_bits": 8, "type": "int", "symmetric": True}


def compressed(
    directory: Path,
    tensors: dict[str, Tensor],
    activations: dict[str, Any] | None = None,
    **weights: Any,
) -> Path:
    """A checkpoint of one scheme: weights with a scale per channel, dynamic activations."""
    group = {
        "targets": ["Linear"],
        "weights": {**ARGUMENTS, "strategy": "channel", "dynamic": False, **weights},
        "input_activations": {
            **ARGUMENTS, "strategy": "token", "dynamic": True, **(activations or {})
        },
    }  # fmt: skip
    named = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"quantization_config": named}))
    return directory


def int8_layer(prefix: str, **others: Tensor) -> dict[str, Tensor]:
    tensors = {
        "weight": torch.ones(HIDDEN, HIDDEN, dtype=torch.int8),
        "weight_scale": torch.ones(HIDDEN, 1),
        **others,
    }
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


DOWN = "model.layers.0.mlp.down_proj"
EXPERT = "model.layers.1.mlp.experts.0.up_proj"
STATIC = {"strategy": "tensor", "dynamic": False}
ASYMMETRIC = {**STATIC, "symmetric": False}
INPUT_SCALE = {"input_scale": torch.ones(1)}


@pytest.mark.parametrize(
    ("tensors", "activations"),
    [
        ({**int8_layer(DOWN), **int8_layer(EXPERT)}, {}),
        (int8_layer(DOWN), {"symmetric": False}),
        (int8_layer(DOWN, **INPUT_SCALE), STATIC),
        (
            int8_layer(DOWN, input_zero_point=torch.ones(1, dtype=torch.int8), **INPUT_SCALE),
            ASYMMETRIC,
        ),
    ],
)
def test_supported_compressed_tensors_schemes_load(tensors, activations, tmp_path):
    found = check_checkpoint(compressed(tmp_path, tensors, activations))
    assert not found.issues
    assert {kind.loads for kind in found.kinds} == {"compressed-tensors"}


@pytest.mark.parametrize(
    ("tensors", "activations", "weights", "told"),
    [
        (int8_layer(DOWN), STATIC, {}, f"{DOWN}.input_scale: is missing"),
        (int8_layer(DOWN, **INPUT_SCALE), ASYMMETRIC, {}, f"{DOWN}.input_zero_point: is missing"),
        (
            int8_layer(EXPERT, **INPUT_SCALE),
            STATIC,
            {},
            f"{EXPERT}.weight: static or asymmetric activations are not available",
        ),
        (int8_layer(DOWN), {}, {"num_bits": 4}, f"{DOWN}.weight: weights of 4 bits"),
        (int8_layer(DOWN), {}, {"symmetric": False}, f"{DOWN}.weight: asymmetric int8 weights"),
        (int8_layer(DOWN), {}, {"num_bits": "many"}, "config.json: its compressed-tensors section"),
        (int8_layer("lm_head"), {}, {}, "lm_head.weight: no group of config.json has it"),
        (
            {f"{DOWN}.weight_packed": torch.ones(HIDDEN, 2, dtype=torch.int32)},
            {},
            {},
            f"{DOWN}.weight_packed: it holds int32 and its scheme says int8",
        ),
        (
            int8_layer(DOWN, weight_scale=torch.ones(HIDDEN)),
            {},
            {},
            f"{DOWN}.weight_scale: has shape [8] and must have [8, 1]",
        ),
        (
            int8_layer(DOWN, weight_scale=torch.ones(HIDDEN, 1, dtype=torch.int32)),
            {},
            {},
            f"{DOWN}.weight_scale: holds int32 and must hold a floating dtype",
        ),
    ],
)
def test_a_problem_in_compressed_tensors_names_its_tensor(
    tensors, activations, weights, told, tmp_path
):
    found = check_checkpoint(compressed(tmp_path, tensors, activations, **weights))
    assert not found.can_load
    assert told in problems(found)
