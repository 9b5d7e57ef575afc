"""The check of a checkpoint with packed weights: complete layers of sizes that fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from vllm_davinci.core.checkpoint.files import StoredTensor
from vllm_davinci.core.checkpoint.issues import CheckReport
from vllm_davinci.core.quantization.packed_weights import PackedFormat
from vllm_davinci.core.quantization.tensors import dtype_name

_FLOATS = ("scales", "weight_scale")


def unpacked(packing: PackedFormat, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """With the names and shapes that the packed weights have as floats."""
    whole = dict(tensors)
    ending = f".{packing.weight}"
    for name, tensor in tensors.items():
        if name.endswith(ending) and len(tensor.shape) == 2:
            weight = f"{name.removesuffix(ending)}.weight"
            whole[weight] = replace(tensor, shape=packing.matrix(tensor.shape))
    return whole


def check_packed(
    packing: PackedFormat, tensors: Mapping[str, StoredTensor], report: CheckReport
) -> None:
    """Whether every packed weight's other tensors are there and fit it."""
    ending = f".{packing.weight}"
    others = set(packing.tensors(32, 32)) - {packing.weight}
    for name in tensors:
        prefix, _, part = name.rpartition(".")
        if part in others and f"{prefix}{ending}" not in tensors:
            report.problem(f"{prefix}{ending}", f"is missing, and {name} is there")
    for name, weight in tensors.items():
        if not name.endswith(ending):
            continue
        prefix = name.removesuffix(ending)
        if len(weight.shape) != 2:
            report.problem(name, f"has shape {list(weight.shape)} and must be a matrix")
            continue
        for part, shape in packing.tensors(*packing.matrix(weight.shape)).items():
            own = f"{prefix}.{part}"
            tensor = tensors.get(own)
            if tensor is None:
                report.problem(own, f"is missing: {packing.method} needs it. Copy the files again")
            elif tensor.shape != shape:
                report.problem(own, f"has shape {list(tensor.shape)} and must have {list(shape)}")
            elif tensor.dtype.is_floating_point != (part in _FLOATS):
                kind = "a floating dtype" if part in _FLOATS else "integers"
                report.problem(own, f"holds {dtype_name(tensor.dtype)} and must hold {kind}")
