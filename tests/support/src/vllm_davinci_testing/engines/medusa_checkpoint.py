"""Medusa's heads for a model, drawn, in the files that such heads are published in."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def random_medusa(target: Path, destination: Path, num_heads: int) -> Path:
    """Writes heads that draft what the target's own head makes of a hidden state that is changed.

    In texts that repeat a token they are right.
    """
    config = json.loads((target / "config.json").read_text())
    width, generator = config["hidden_size"], torch.Generator().manual_seed(6)
    weights = load_file(target / "model.safetensors")
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    tensors = {}
    for number in range(num_heads):
        drawn = torch.randn(width, width, generator=generator) * 0.01
        tensors[f"medusa_heads.{number}.0.linear.weight"] = drawn.to(torch.bfloat16)
        tensors[f"medusa_heads.{number}.0.linear.bias"] = torch.zeros(width, dtype=torch.bfloat16)
        tensors[f"medusa_heads.{number}.1.weight"] = head.clone()
    changes = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": width,
        "vocab_size": config["vocab_size"],
        "medusa_num_heads": num_heads,
        "medusa_num_layers": 1,
        "medusa_fc_bias": True,
    }
    destination.mkdir()
    save_file(tensors, destination / "model.safetensors")
    (destination / "config.json").write_text(json.dumps(changes))
    return destination
