"""Where an export starts: a float checkpoint, or one with fp8 weights in blocks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from vllm_davinci.core.checkpoint.conversion import require_usable
from vllm_davinci.core.checkpoint.files import StoredTensor
from vllm_davinci.core.errors import CheckpointError
from vllm_davinci.core.quantization.block_fp8 import Block, as_floats, block_of, require_scale
from vllm_davinci.core.quantization.description import find_description


def require_float(
    directory: Path, config: Mapping[str, Any], stored: Mapping[str, StoredTensor]
) -> None:
    """Raises CheckpointError for a checkpoint that is quantized already."""
    if find_description(directory) is not None or config.get("quantization_config"):
        raise CheckpointError(
            f"{directory} is quantized already. Start from the model's float checkpoint."
        )
    strange = [
        name for name, tensor in stored.items()
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2
    ]  # fmt: skip
    weights = [name for name in strange if name.endswith("_proj.weight")]
    if weights:
        raise CheckpointError(
            f"{weights[0]} of {directory} holds {stored[weights[0]].dtype}. Start from the model's "
            "float checkpoint."
        )


def source_block(config: Mapping[str, Any]) -> Block | None:
    """The blocks of a source with fp8 weights, or None for another source."""
    return block_of(config.get("quantization_config"))


def require_calibratable(source: Path, config: Mapping[str, Any]) -> None:
    """Raises CheckpointError for a source that transformers does not run on a CPU."""
    if source_block(config) is not None:
        raise CheckpointError(
            f"{source} holds fp8 weights, with which the model does not run for --calibrate. Make "
            "a float checkpoint first: vllm-davinci quantize SOURCE DESTINATION --type FLOAT."
        )


def read_tensor(stored: Mapping[str, StoredTensor], name: str) -> torch.Tensor | None:
    """The tensor from its file, or None where the checkpoint has none of that name."""
    entry = stored.get(name)
    if entry is None:
        return None
    with safe_open(entry.file, framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
    return tensor


def floats_of_fp8(
    name: str, weight: torch.Tensor, stored: Mapping[str, StoredTensor], block: Block
) -> torch.Tensor:
    """fp32, the values that an fp8 weight stands for.

    Raises CheckpointError when its scales are missing, of another shape, or no positive numbers.
    """
    scale = read_tensor(stored, f"{name}_scale_inv")
    require_scale(name, weight, scale, block)
    assert scale is not None
    require_usable(f"{name}_scale_inv", scale)
    return as_floats(weight, scale, block, torch.float32)
