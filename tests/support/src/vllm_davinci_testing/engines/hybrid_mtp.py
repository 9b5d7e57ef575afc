"""Small checkpoints of models whose layers keep states, with a layer for further tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

# How the families' configurations count these layers.
COUNTED_BY = {"qwen3_next": "num_nextn_predict_layers"}


def with_hybrid_mtp(source: Path, destination: Path) -> Path:
    """Copies `source`, whose last layer has attention, and gives it one after that.

    It is the last layer once more, after a projection that leaves the hidden state almost as it is:
    its drafts are right now and then.
    """
    shutil.copytree(source, destination)
    path = destination / "config.json"
    config = json.loads(path.read_text())
    counted_by = COUNTED_BY.get(config["model_type"], "mtp_num_hidden_layers")
    path.write_text(json.dumps(config | {counted_by: 1}))
    depth, width = config["num_hidden_layers"], config["hidden_size"]
    last = f"model.layers.{depth - 1}."
    tensors = {
        name.replace(last, "mtp.layers.0."): tensor.clone()
        for name, tensor in load_file(source / "model.safetensors").items()
        if name.startswith(last)
    }
    noise = torch.randn(width, 2 * width, generator=torch.Generator().manual_seed(0)) * 0.01
    tensors["mtp.fc.weight"] = torch.cat([torch.zeros(width, width), torch.eye(width)], 1) + noise
    # Norms of these families multiply with 1 + weight.
    names = ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
    tensors |= {f"mtp.{name}.weight": torch.zeros(width) for name in names}
    save_file(tensors, destination / "mtp.safetensors")
    return destination
