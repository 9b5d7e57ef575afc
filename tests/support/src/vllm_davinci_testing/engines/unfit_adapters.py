"""Adapters that do not fit a model, and the error for each."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from vllm_davinci_testing.engines.adapters import WEIGHTS, write_files


def _with_shape(directory: Path, base: Path) -> None:
    tensors = load_file(base / WEIGHTS)
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"
    tensors[name] = tensors[name][:-1]
    write_files(directory, tensors, {"r": 8, "target_modules": ["down_proj"]})


def _with_another_layer(directory: Path, base: Path) -> None:
    tensors = load_file(base / WEIGHTS)
    tensors = {name.replace("layers.1.", "layers.7."): each for name, each in tensors.items()}
    write_files(directory, tensors, {"r": 8, "target_modules": ["q_proj"]})


def _with_target(directory: Path, base: Path) -> None:
    pair = {
        f"base_model.model.model.layers.0.self_attn.rotary.lora_{which}.weight": torch.ones(8, 8)
        for which in "AB"
    }
    write_files(directory, pair, {"r": 8, "target_modules": ["rotary"]})


def _with_infinity(directory: Path, base: Path) -> None:
    tensors = load_file(base / WEIGHTS)
    tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"][0, 0] = torch.inf
    write_files(directory, tensors, {"r": 8, "target_modules": ["q_proj"]})


def _with_rank(directory: Path, base: Path) -> None:
    tensors = load_file(base / WEIGHTS)
    write_files(directory, tensors, {"r": 128, "target_modules": ["q_proj"]})


# Functions that make a fitting adapter of rank 8 unfit -> a pattern of the error.
UNFIT: list[tuple[Callable[[Path, Path], None], str]] = [
    (_with_shape, r"layers.1.mlp.down_proj: shapes .* \[255, 8\]; .*\[256, rank\]"),
    (_with_another_layer, "layers.7.*the model has none"),
    (_with_target, "rotary"),
    (_with_infinity, "layers.0.self_attn.q_proj: values that are not finite"),
    (_with_rank, "128"),
]
