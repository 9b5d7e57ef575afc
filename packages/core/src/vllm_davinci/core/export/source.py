"""The source of an export: a float checkpoint, or one with fp8 weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from vllm_davinci.core.checkpoint.check import quantization_config
from vllm_davinci.core.errors import CheckpointError
from vllm_davinci.core.quantization.config import is_described
from vllm_davinci.core.quantization.formats.fp8_block import Fp8Weights
from vllm_davinci.core.quantization.fp8 import SCALES, as_floats, require_scale, scale_of
from vllm_davinci.core.quantization.loading import require_usable
from vllm_davinci.core.weight_files.files import StoredTensor


def require_float(
    directory: Path, config: Mapping[str, Any], stored: Mapping[str, StoredTensor]
) -> None:
    """Raises CheckpointError for a checkpoint that is already quantized."""
    if is_described(directory) or quantization_config(config):
        raise CheckpointError(
            f"{directory} is already quantized. Start from the model's float checkpoint."
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


def require_inside(directory: Path, path: Path) -> None:
    """Raises CheckpointError for a link to a file outside the checkpoint: it would be copied."""
    target, own = path.resolve(), directory.resolve()
    blobs = own.parent.parent / "blobs" if own.parent.name == "snapshots" else own
    if not (target.is_relative_to(own) or target.is_relative_to(blobs)):
        raise CheckpointError(
            f"{path} is a link to {target} outside the checkpoint, and its copy would be published"
            " with the result. Remove the link, or replace it with the file."
        )


def source_fp8(config: Mapping[str, Any]) -> Fp8Weights | None:
    """The format of a source with fp8 weights, or None for another source."""
    return Fp8Weights.of(quantization_config(config))


def require_calibratable(source: Path, config: Mapping[str, Any]) -> None:
    """Raises CheckpointError for a source that transformers cannot run on a CPU."""
    if source_fp8(config) is not None:
        raise CheckpointError(
            f"--calibrate cannot run {source}, which holds fp8 weights. Make a float checkpoint "
            "first: vllm-davinci quantize SOURCE DESTINATION --type FLOAT."
        )


def read_tensor(stored: Mapping[str, StoredTensor], name: str) -> torch.Tensor | None:
    """The tensor from its file; None if the checkpoint has no such tensor."""
    entry = stored.get(name)
    if entry is None:
        return None
    with safe_open(entry.file, framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
    return tensor


def floats_of_fp8(
    name: str, weight: torch.Tensor, stored: Mapping[str, StoredTensor], format: Fp8Weights
) -> torch.Tensor:
    """Dequantizes an fp8 weight to fp32.

    Raises CheckpointError if its scales are missing, not positive or have another shape.
    """
    scale_name = scale_of(name, stored) or f"{name}{SCALES[0]}"
    scale = read_tensor(stored, scale_name)
    require_scale(name, weight, scale_name, scale, format.blocks)
    assert scale is not None
    require_usable(scale_name, scale)
    return as_floats(weight, scale, format.blocks, torch.float32)
