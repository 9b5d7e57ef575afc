"""The checkpoint check: what would be loaded, what is missing, what disagrees.

Reads configuration, index and headers, no weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_davinci.core.checkpoint.block_fp8_check import check_block_fp8
from vllm_davinci.core.checkpoint.compressed_check import check_compressed
from vllm_davinci.core.checkpoint.config_check import check_against_config
from vllm_davinci.core.checkpoint.described_check import (
    check_described,
    layer_types,
    whole_matrices,
)
from vllm_davinci.core.checkpoint.files import (
    StoredTensor,
    misplaced_tensors,
    read_config,
    read_header,
    tensor_files,
)
from vllm_davinci.core.checkpoint.issues import CheckReport, LayerKind
from vllm_davinci.core.checkpoint.packed_check import check_packed, unpacked
from vllm_davinci.core.errors import CheckpointError, CoreError
from vllm_davinci.core.quantization import block_fp8
from vllm_davinci.core.quantization.compressed_schemes import NAME as COMPRESSED
from vllm_davinci.core.quantization.description import (
    WRAPPED_NORM,
    QuantDescription,
    find_description,
    shortened,
)
from vllm_davinci.core.quantization.packed_weights import AWQ, GPTQ, PackedFormat, packed_format
from vllm_davinci.core.quantization.tensors import dtype_name

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def check_checkpoint(directory: Path) -> CheckReport:
    """Checks everything that can be told without reading a weight.

    Raises nothing for bad files: they become issues of the report.
    """
    report = CheckReport(str(directory))
    tensors: dict[str, StoredTensor] = {}
    try:
        config = read_config(directory)
        files = tensor_files(directory)
    except CheckpointError as error:
        report.problem(str(directory), str(error))
        return report
    for path in files:
        try:
            header = read_header(path)
        except CheckpointError as error:
            report.problem(path.name, str(error))
            continue
        for name in sorted(header.keys() & tensors.keys()):
            report.problem(name, f"is in {tensors[name].file.name} and in {path.name}")
        tensors |= header
    report.num_tensors = len(tensors)
    report.num_bytes = sum(path.stat().st_size for path in files)
    if misplaced := misplaced_tensors(directory, tensors):
        report.problem(
            shortened(misplaced), "the index puts it into a file whose header does not have it"
        )
    description = _description(directory, config, report)
    packing = None if description is not None else _packing(config, report)
    layers = {
        name.removesuffix(".weight"): tensor
        for name, tensor in tensors.items()
        if name.endswith(".weight") and not WRAPPED_NORM.match(name)
    }
    types = layer_types(layers, tensors, description, report)
    _add_kinds(layers, types, report)
    if description is not None:
        check_described(layers, tensors, description, report)
    elif packing is not None:
        check_packed(packing, tensors, report)
    elif report.quantization.startswith(COMPRESSED):
        check_compressed(_quantization_config(config), tensors, report)
    elif report.quantization.startswith(block_fp8.NAME):
        check_block_fp8(_quantization_config(config), tensors, report)
    whole = whole_matrices(tensors, description) if packing is None else unpacked(packing, tensors)
    check_against_config(config, whole, report)
    return report


def _packing(config: Mapping[str, Any], report: CheckReport) -> PackedFormat | None:
    try:
        return packed_format(_quantization_config(config))
    except CoreError as error:
        report.problem("config.json", str(error))
        return None


def _description(
    directory: Path, config: Mapping[str, Any], report: CheckReport
) -> QuantDescription | None:
    try:
        path = find_description(directory)
        if path is not None:
            description = QuantDescription.load(path)
            report.quantization = f"ascend ({path.name}, {description.generation})"
            description.refuse_unsupported_options()
            return description
    except CoreError as error:
        report.problem(str(directory), str(error))
        return None
    named = _quantization_config(config)
    if method := named.get("quant_method"):
        report.quantization = f"{method} (config.json)"
        if method not in (AWQ, GPTQ, COMPRESSED, block_fp8.NAME):
            report.problem(
                "config.json",
                f"quantization method {method!r} is not available; ascend, compressed-tensors, "
                "awq, gptq and fp8 in blocks are. Use a float checkpoint, or vllm-davinci quantize "
                "on one",
            )
    return None


def _quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("quantization_config") or config.get("compression_config") or {}


def _add_kinds(
    layers: Mapping[str, StoredTensor], types: Mapping[str, str], report: CheckReport
) -> None:
    groups: dict[tuple[str, str, str], list[StoredTensor]] = {}
    for prefix, weight in layers.items():
        if len(weight.shape) < 2:
            continue
        key = (_NUMBER.sub("*", prefix), types[prefix], dtype_name(weight.dtype))
        groups.setdefault(key, []).append(weight)
    report.kinds = [
        LayerKind(name, loads, len(weights), dtype, weights[0].shape)
        for (name, loads, dtype), weights in sorted(groups.items())
    ]
