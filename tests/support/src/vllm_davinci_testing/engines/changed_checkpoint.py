"""A checkpoint with changed weights, as after training."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def changed(checkpoint: Path, directory: Path, seed: int) -> Path:
    """Copies the checkpoint and changes its float tensors slightly."""
    shutil.copytree(checkpoint, directory)
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        noise = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        tensors[name] = tensor + noise * tensor.std() * 0.2 if tensor.numel() > 1 else tensor
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
