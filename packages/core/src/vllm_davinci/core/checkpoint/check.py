"""The checkpoint check: what would be loaded, what is missing, what disagrees.

Reads configuration, index and headers, no weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_davinci.core.checkpoint.compressed_check import check_compressed
from vllm_davinci.core.checkpoint.config_check import EXPERT, VOCABULARY, check_against_config
from vllm_davinci.core.checkpoint.files import (
    StoredTensor,
    misplaced_tensors,
    read_config,
    read_header,
    tensor_files,
)
from vllm_davinci.core.checkpoint.issues import CheckReport, LayerKind
from vllm_davinci.core.errors import CheckpointError, CoreError
from vllm_davinci.core.quantization.compressed_schemes import NAME as COMPRESSED
from vllm_davinci.core.quantization.description import (
    FUSED_LAYERS,
    QuantDescription,
    QuantType,
    find_description,
    quant_type,
    shortened,
)
from vllm_davinci.core.quantization.tensors import LINEAR_TENSORS, dtype_name

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_EXTRA_NAMES = frozenset(
    spec.name for specs in LINEAR_TENSORS.values() for spec in specs if spec.name != "weight"
)


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
    layers = {
        name.removesuffix(".weight"): tensor
        for name, tensor in tensors.items()
        if name.endswith(".weight")
    }
    types = _types(layers, tensors, description, report)
    _add_kinds(layers, types, report)
    if description is not None:
        _check_agreement(layers, description, report)
        _check_entries(tensors, description, report)
    elif report.quantization.startswith(COMPRESSED):
        check_compressed(_quantization_config(config), tensors, report)
    check_against_config(config, tensors, report)
    return report


def _description(
    directory: Path, config: Mapping[str, Any], report: CheckReport
) -> QuantDescription | None:
    try:
        path = find_description(directory)
        if path is not None:
            description = QuantDescription.load(path)
            report.quantization = f"ascend ({path.name})"
            description.refuse_unsupported_options()
            return description
    except CoreError as error:
        report.problem(str(directory), str(error))
        return None
    named = _quantization_config(config)
    if method := named.get("quant_method"):
        report.quantization = f"{method} (config.json)"
        if method != COMPRESSED:
            report.problem(
                "config.json",
                f"quantization method {method!r} is not available; ascend and compressed-tensors "
                "are. Use a float checkpoint, or vllm-davinci quantize on one",
            )
    return None


def _quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("quantization_config") or config.get("compression_config") or {}


def _types(
    layers: Mapping[str, StoredTensor],
    tensors: Mapping[str, StoredTensor],
    description: QuantDescription | None,
    report: CheckReport,
) -> dict[str, str]:
    """The type that each layer would be loaded as; tensors that it lacks become issues."""
    types: dict[str, str] = {}
    without_entry: list[str] = []
    for prefix, weight in layers.items():
        name = None if description is None else description.types.get(f"{prefix}.weight")
        if description is not None and name is None and len(weight.shape) > 1:
            without_entry.append(prefix)
        if name is None:
            kind = QuantType.FLOAT
            is_foreign = description is None and not report.quantization.startswith("none")
            if is_foreign:
                types[prefix] = report.quantization.split()[0]
                continue
        else:
            try:
                kind = quant_type(name, f"{prefix}.weight")
            except CoreError as error:
                report.problem(f"{prefix}.weight", str(error))
                types[prefix] = f"{name} (unknown)"
                continue
        types[prefix] = kind.value
        _check_tensors(prefix, weight, kind, tensors, report)
    if without_entry:
        report.note(
            shortened(sorted(without_entry), 6),
            f"no entry in the description: loaded as {QuantType.FLOAT.value}",
        )
    return types


def _check_tensors(
    prefix: str,
    weight: StoredTensor,
    kind: QuantType,
    tensors: Mapping[str, StoredTensor],
    report: CheckReport,
) -> None:
    specs = LINEAR_TENSORS[kind]
    if kind is QuantType.FLOAT:
        if not weight.dtype.is_floating_point:
            report.problem(
                f"{prefix}.weight",
                f"holds {dtype_name(weight.dtype)} and would be loaded as {kind.value}: its scales "
                "would be left out. Give it its type in the description",
            )
        left = sorted(f"{prefix}.{name}" for name in _EXTRA_NAMES if f"{prefix}.{name}" in tensors)
        if left:
            report.problem(
                shortened(left), f"belongs to a quantized layer, and this is {kind.value}"
            )
        return
    if prefix.rpartition(".")[2] in VOCABULARY:
        report.problem(
            f"{prefix}.weight", f"is {kind.value}; embeddings and LM heads are FLOAT only"
        )
    if len(weight.shape) != 2:
        report.problem(f"{prefix}.weight", f"has shape {list(weight.shape)} and must be a matrix")
        return
    for spec in specs:
        name = f"{prefix}.{spec.name}"
        tensor = tensors.get(name)
        expected = spec.extent.shape(*weight.shape)
        if tensor is None:
            report.problem(name, f"is missing: {kind.value} needs it. Export the model again")
            continue
        if tensor.shape != expected:
            report.problem(name, f"has shape {list(tensor.shape)} and must have {list(expected)}")
        if not spec.accepts(tensor.dtype):
            report.problem(
                name, f"holds {dtype_name(tensor.dtype)} and must hold {spec.accepted()}"
            )


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


def _check_agreement(
    layers: Mapping[str, StoredTensor], description: QuantDescription, report: CheckReport
) -> None:
    """Parts that vLLM computes as one product must have one type."""
    for prefix in layers:
        parent, _, name = prefix.rpartition(".")
        for fused, parts in FUSED_LAYERS.items():
            if name != parts[0] or any(f"{parent}.{part}" not in layers for part in parts):
                continue
            _try(lambda p=f"{parent}.{fused}": description.of_layer(p), f"{parent}.{fused}", report)
    for experts in {match["experts"] for prefix in layers if (match := EXPERT.match(prefix))}:
        _try(lambda p=experts: description.of_experts(p), experts, report)


def _try(look_up: Any, subject: str, report: CheckReport) -> None:
    try:
        look_up()
    except CheckpointError as error:
        report.problem(subject, str(error))
    except CoreError:
        pass  # an unknown type, which has its issue


def _check_entries(
    tensors: Mapping[str, StoredTensor], description: QuantDescription, report: CheckReport
) -> None:
    absent = sorted(name for name in description.types if name not in tensors)
    if absent:
        report.problem(
            shortened(absent, 6),
            f"{len(absent)} tensors have an entry in the description and are in no file",
        )
