"""A small DeepSeek checkpoint with MTP layers, random by seed."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "mtp.safetensors"


def with_random_mtp(source: Path, destination: Path, seed: int = 0, count: int = 1) -> Path:
    """Copies `source` and adds `count` MTP layers, as in released checkpoints.

    They copy the last layer's attention and experts; the projection of embedding and hidden state
    is random. Some of their drafts are right.
    """
    shutil.copytree(source, destination)
    (destination / WEIGHTS).unlink(missing_ok=True)
    path = destination / "config.json"
    config = json.loads(path.read_text())
    depth, width = config["num_hidden_layers"], config["hidden_size"]
    path.write_text(json.dumps(config | {"num_nextn_predict_layers": count}))
    target = load_file(source / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    copied = _layer_to_copy(target, depth)
    for number in range(depth, depth + count):
        prefix = f"model.layers.{number}."
        tensors |= {f"{prefix}{name}": tensor for name, tensor in copied.items()}
        noise = torch.randn(width, 2 * width, generator=generator) * 0.02
        drawn = torch.cat([torch.zeros(width, width), torch.eye(width)], dim=1) + noise
        ones = torch.ones(width, dtype=torch.bfloat16)
        tensors |= {
            f"{prefix}enorm.weight": ones,
            f"{prefix}hnorm.weight": ones.clone(),
            f"{prefix}eh_proj.weight": drawn.to(torch.bfloat16),
            f"{prefix}shared_head.norm.weight": target["model.norm.weight"],
            f"{prefix}shared_head.head.weight": target["lm_head.weight"],
            f"{prefix}embed_tokens.weight": target["model.embed_tokens.weight"],
        }
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, destination / WEIGHTS)
    return destination


def with_copied_mtp(source: Path, destination: Path, count: int) -> Path:
    """Copies `source`, with `count` copies of its trained MTP layer.

    They draft about as well as one layer that runs `count` times.
    """
    shutil.copytree(source, destination)
    path = destination / "config.json"
    config = json.loads(path.read_text())
    depth = config["num_hidden_layers"]
    path.write_text(json.dumps(config | {"num_nextn_predict_layers": count}))
    trained, prefix = load_file(source / WEIGHTS), f"model.layers.{depth}."
    tensors = {
        name.replace(prefix, f"model.layers.{depth + number}."): tensor.clone()
        for name, tensor in trained.items()
        for number in range(count if name.startswith(prefix) else 1)
    }
    save_file(tensors, destination / WEIGHTS)
    return destination


def _layer_to_copy(target: dict[str, torch.Tensor], depth: int) -> dict[str, torch.Tensor]:
    """Returns the last layer's tensors, with the indexer of the last layer that has one.

    With sparse attention, every MTP layer has its own indexer.
    """

    def of_layer(number: int, part: str = "") -> dict[str, torch.Tensor]:
        prefix = f"model.layers.{number}."
        return {
            name.removeprefix(prefix): tensor
            for name, tensor in target.items()
            if name.startswith(f"{prefix}{part}")
        }

    indexers = [of_layer(number, "self_attn.indexer.") for number in reversed(range(depth))]
    return next(filter(None, indexers), {}) | of_layer(depth - 1)
