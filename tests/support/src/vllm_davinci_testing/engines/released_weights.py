"""Weights of a small multimodal model, with released names."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from vllm_davinci_testing.engines.model_zoo import fill_with_normal_weights, write_tokenizer

# Models and encoders for which transformers 5 writes other names than it reads.
NAMED_OTHERWISE = {
    "glmasr",
    "qwen2_audio",
    "clip_vision_model",
    "siglip_vision_model",
    "siglip2_vision_model",
}


def write_network(
    config: transformers.PretrainedConfig,
    directory: Path,
    seed: int,
    fill: Callable[[Any], None] = lambda network: None,
    auto_class: str = "AutoModelForImageTextToText",
) -> Any:
    """Writes configuration, fp32 weights and the byte tokenizer; returns the network.

    fill: fills parameters other than matrices and norms
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = getattr(transformers, auto_class).from_config(config, dtype=torch.float32)
        fill_with_normal_weights(network)
        fill(network)
    network.save_pretrained(directory)
    vision = getattr(network.config, "vision_config", None)
    if NAMED_OTHERWISE & {network.config.model_type, getattr(vision, "model_type", None)}:
        name_as_released(directory / "model.safetensors")
    write_tokenizer(directory)
    return network


def name_as_released(file: Path) -> None:
    """Restores released names, which transformers 5 reads and vLLM needs: transformers 5 writes an
    encoder's names without one part, and the names of an audio model's text with an extra part.
    """
    with safe_open(file, "pt") as stored:
        metadata = stored.metadata()
    weights = {_released_name(name): each for name, each in load_file(file).items()}
    save_file(weights, file, metadata)


def _released_name(name: str) -> str:
    name = re.sub(r"(^|\.)vision_tower\.(?!vision_model)", r"\1vision_tower.vision_model.", name)
    return re.sub(r"^language_model\.model\.model\.", "language_model.model.", name)


def transpose_experts(file: Path) -> None:
    """Stores fused experts in the released order: transformers 5 reads both orders and writes the
    other.
    """
    with safe_open(file, "pt") as stored:
        metadata = stored.metadata()
    weights = {
        name: each.transpose(1, 2).contiguous() if ".experts." in name else each
        for name, each in load_file(file).items()
    }
    save_file(weights, file, metadata)
