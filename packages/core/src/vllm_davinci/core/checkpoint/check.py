"""The checkpoint check: what would be loaded, what is missing, what disagrees.

Reads configuration, index and headers, no weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

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
from vllm_davinci.core.checkpoint.packed_check import check_packed, unpacked
from vllm_davinci.core.errors import CheckpointError, CoreError, UnsupportedFeatureError
from vllm_davinci.core.quantization import block_fp8
from vllm_davinci.core.quantization.compressed_schemes import NAME as COMPRESSED
from vllm_davinci.core.quantization.description import (
    FUSED_LAYERS,
    LOADED_AS,
    WEIGHT_ONLY,
    WRAPPED_NORM,
    QuantDescription,
    QuantType,
    find_description,
    quant_type,
    shortened,
)
from vllm_davinci.core.quantization.packed_weights import AWQ, GPTQ, PackedFormat, packed_format
from vllm_davinci.core.quantization.tensors import STORED_TENSORS, dtype_name, stored_tensors
from vllm_davinci.core.quantization.weight_only import WAY_OUT, refusal_of_groups

_PLAIN = STORED_TENSORS[QuantType.FLOAT.value]
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_EXTRA_NAMES = frozenset(
    spec.name for specs in STORED_TENSORS.values() for spec in specs if spec.name != "weight"
) | {"weight_scale_second", "weight_offset_second"}


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
    types = _types(layers, tensors, description, report)
    _add_kinds(layers, types, report)
    if description is not None:
        _check_scales_have_weights(layers, tensors, report)
        _check_agreement(layers, description, report)
        _check_entries(tensors, description, report)
    elif packing is not None:
        check_packed(packing, tensors, report)
    elif report.quantization.startswith(COMPRESSED):
        check_compressed(_quantization_config(config), tensors, report)
    elif report.quantization.startswith(block_fp8.NAME):
        _check_block_fp8(_quantization_config(config), tensors, report)
    whole = _unpacked(tensors, description) if packing is None else unpacked(packing, tensors)
    check_against_config(config, whole, report)
    return report


def _packing(config: Mapping[str, Any], report: CheckReport) -> PackedFormat | None:
    try:
        return packed_format(_quantization_config(config))
    except CoreError as error:
        report.problem("config.json", str(error))
        return None


def _check_block_fp8(
    named: Mapping[str, Any], tensors: Mapping[str, StoredTensor], report: CheckReport
) -> None:
    try:
        block = block_fp8.block_of(named)
    except UnsupportedFeatureError as error:
        report.problem("config.json", str(error))
        return
    assert block is not None
    for name, tensor in tensors.items():
        weight = tensors.get(name.removesuffix("_scale_inv"))
        if weight is not tensor and (weight is None or weight.dtype != block_fp8.DTYPE):
            report.problem(name, "is there, and it belongs to no fp8 weight")
        elif tensor.dtype == block_fp8.DTYPE:
            scale = tensors.get(f"{name}_scale_inv")
            expected = block.scale_shape(tensor.shape) if len(tensor.shape) == 2 else ()
            if scale is None:
                report.problem(f"{name}_scale_inv", "is missing: the weight is fp8")
            elif scale.shape != expected or scale.dtype != torch.float32:
                report.problem(
                    f"{name}_scale_inv",
                    f"is {dtype_name(scale.dtype)} {list(scale.shape)} and must be float32 "
                    f"{list(expected)}",
                )


def _check_scales_have_weights(
    layers: Mapping[str, StoredTensor], tensors: Mapping[str, StoredTensor], report: CheckReport
) -> None:
    lacking: dict[str, str] = {}
    for name in tensors:
        prefix, _, part = name.rpartition(".")
        if part in _EXTRA_NAMES and prefix not in layers:
            lacking.setdefault(f"{prefix}.weight", name)
    for weight, name in lacking.items():
        report.problem(weight, f"is missing, and {name} is there")


def _unpacked(
    tensors: Mapping[str, StoredTensor], description: QuantDescription | None
) -> dict[str, StoredTensor]:
    """With the shapes that weights have which are stored in fewer rows."""
    if description is None:
        return dict(tensors)
    whole: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        kind = description.types.get(name, "")
        if name.endswith(".weight") and kind in STORED_TENSORS and len(tensor.shape) == 2:
            extent = stored_tensors(kind, description)[0].extent
            tensor = replace(tensor, shape=extent.matrix(tensor.shape))
        whole[name] = tensor
    return whole


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
            name = QuantType.FLOAT.value
            is_foreign = description is None and not report.quantization.startswith("none")
            if is_foreign:
                types[prefix] = report.quantization.split()[0]
                continue
        else:
            try:
                quant_type(name, f"{prefix}.weight")
            except CoreError as error:
                report.problem(f"{prefix}.weight", str(error))
                types[prefix] = f"{name} (unknown)"
                continue
        loaded_as = LOADED_AS[name].value
        types[prefix] = loaded_as if loaded_as == name else f"{loaded_as} ({name})"
        _check_tensors(prefix, weight, name, description, tensors, report)
    if without_entry:
        report.note(
            shortened(sorted(without_entry), 6),
            f"no entry in the description: loaded as {QuantType.FLOAT.value}",
        )
    return types


def _check_tensors(
    prefix: str,
    weight: StoredTensor,
    stored_as: str,
    description: QuantDescription | None,
    tensors: Mapping[str, StoredTensor],
    report: CheckReport,
) -> None:
    """stored_as: the layer's type in the description"""
    specs = _PLAIN if description is None else stored_tensors(stored_as, description)
    group_size = 0 if description is None else description.group_size
    names = {spec.name for spec in specs}
    if stored_as == QuantType.FLOAT.value and not weight.dtype.is_floating_point:
        report.problem(
            f"{prefix}.weight",
            f"holds {dtype_name(weight.dtype)} and would be loaded as {stored_as}: its scales "
            "would be left out. Give it its type in the description",
        )
    left = sorted(
        f"{prefix}.{name}" for name in _EXTRA_NAMES - names if f"{prefix}.{name}" in tensors
    )
    if left:
        report.problem(
            shortened(left), f"belongs to a layer of another type, and this is {stored_as}"
        )
    if stored_as == QuantType.FLOAT.value:
        return
    if prefix.rpartition(".")[2] in VOCABULARY:
        report.problem(
            f"{prefix}.weight", f"is {stored_as}; embeddings and LM heads are FLOAT only"
        )
    if len(weight.shape) != 2:
        report.problem(f"{prefix}.weight", f"has shape {list(weight.shape)} and must be a matrix")
        return
    rows, columns = specs[0].extent.matrix(weight.shape)
    if LOADED_AS[stored_as] in WEIGHT_ONLY and (reason := refusal_of_groups(group_size)):
        report.problem(f"{prefix}.weight", f"is {stored_as}: {reason}. {WAY_OUT}")
    for spec in specs:
        name = f"{prefix}.{spec.name}"
        tensor = tensors.get(name)
        if tensor is None:
            if not spec.is_optional:
                report.problem(name, f"is missing: {stored_as} needs it. Export the model again")
            continue
        expected = spec.extent.shapes(rows, columns, group_size)
        if tensor.shape not in expected:
            told = " or ".join(str(list(shape)) for shape in expected)
            report.problem(name, f"has shape {list(tensor.shape)} and must have {told}")
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
