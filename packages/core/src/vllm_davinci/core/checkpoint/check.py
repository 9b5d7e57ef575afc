"""What a checkpoint directory would be loaded as, what it lacks and what disagrees in it.

Reads configuration, index and headers, no weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_davinci.core.checkpoint.files import (
    StoredTensor,
    misplaced_tensors,
    read_config,
    read_header,
    tensor_files,
)
from vllm_davinci.core.checkpoint.issues import Examination, LayerKind
from vllm_davinci.core.checkpoint.model_structure import EXPERT, VOCABULARY, check_structure
from vllm_davinci.core.errors import CheckpointError, CoreError
from vllm_davinci.core.quantization.compressed_schemes import NAME as COMPRESSED
from vllm_davinci.core.quantization.compressed_schemes import check_compressed
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


def examine(directory: Path) -> Examination:
    """Looks at everything that can be told without reading a weight. Raises nothing for bad files;
    what is wrong with them is in the findings.
    """
    found = Examination(str(directory))
    tensors: dict[str, StoredTensor] = {}
    try:
        config = read_config(directory)
        files = tensor_files(directory)
    except CheckpointError as error:
        found.problem(str(directory), str(error))
        return found
    for path in files:
        try:
            header = read_header(path)
        except CheckpointError as error:
            found.problem(path.name, str(error))
            continue
        for name in sorted(header.keys() & tensors.keys()):
            found.problem(name, f"is in {tensors[name].file.name} and in {path.name}")
        tensors |= header
    found.num_tensors = len(tensors)
    found.num_bytes = sum(path.stat().st_size for path in files)
    if misplaced := misplaced_tensors(directory, tensors):
        found.problem(
            shortened(misplaced), "the index puts it into a file whose header does not have it"
        )
    description = _description(directory, config, found)
    layers = {
        name.removesuffix(".weight"): tensor
        for name, tensor in tensors.items()
        if name.endswith(".weight")
    }
    types = _types(layers, tensors, description, found)
    _add_kinds(layers, types, found)
    if description is not None:
        _check_agreement(layers, description, found)
        _check_entries(tensors, description, found)
    elif found.quantization.startswith(COMPRESSED):
        check_compressed(_quantization_config(config), tensors, found)
    check_structure(config, tensors, found)
    return found


def _description(
    directory: Path, config: Mapping[str, Any], found: Examination
) -> QuantDescription | None:
    try:
        path = find_description(directory)
        if path is not None:
            description = QuantDescription.load(path)
            found.quantization = f"ascend ({path.name})"
            description.refuse_unsupported_options()
            return description
    except CoreError as error:
        found.problem(str(directory), str(error))
        return None
    named = _quantization_config(config)
    if method := named.get("quant_method"):
        found.quantization = f"{method} (config.json)"
        if method != COMPRESSED:
            found.problem(
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
    found: Examination,
) -> dict[str, str]:
    """How each layer would be loaded; what its tensors lack goes into the findings."""
    types: dict[str, str] = {}
    without_entry: list[str] = []
    for prefix, weight in layers.items():
        name = None if description is None else description.types.get(f"{prefix}.weight")
        if description is not None and name is None and len(weight.shape) > 1:
            without_entry.append(prefix)
        if name is None:
            kind = QuantType.FLOAT
            is_foreign = description is None and not found.quantization.startswith("none")
            if is_foreign:
                types[prefix] = found.quantization.split()[0]
                continue
        else:
            try:
                kind = quant_type(name, f"{prefix}.weight")
            except CoreError as error:
                found.problem(f"{prefix}.weight", str(error))
                types[prefix] = f"{name} (unknown)"
                continue
        types[prefix] = kind.value
        _check_tensors(prefix, weight, kind, tensors, found)
    if without_entry:
        found.note(
            shortened(sorted(without_entry), 6),
            f"no entry in the description: loaded as {QuantType.FLOAT.value}",
        )
    return types


def _check_tensors(
    prefix: str,
    weight: StoredTensor,
    kind: QuantType,
    tensors: Mapping[str, StoredTensor],
    found: Examination,
) -> None:
    specs = LINEAR_TENSORS[kind]
    if kind is QuantType.FLOAT:
        if not weight.dtype.is_floating_point:
            found.problem(
                f"{prefix}.weight",
                f"holds {dtype_name(weight.dtype)} and would be loaded as {kind.value}: its scales "
                "would be left out. Give it its type in the description",
            )
        left = sorted(f"{prefix}.{name}" for name in _EXTRA_NAMES if f"{prefix}.{name}" in tensors)
        if left:
            found.problem(
                shortened(left), f"belongs to a quantized layer, and this is {kind.value}"
            )
        return
    if prefix.rpartition(".")[2] in VOCABULARY:
        found.problem(
            f"{prefix}.weight", f"is {kind.value}; embeddings and LM heads are FLOAT only"
        )
    if len(weight.shape) != 2:
        found.problem(f"{prefix}.weight", f"has shape {list(weight.shape)} and must be a matrix")
        return
    for spec in specs:
        name = f"{prefix}.{spec.name}"
        tensor = tensors.get(name)
        expected = spec.extent.shape(*weight.shape)
        if tensor is None:
            found.problem(name, f"is missing: {kind.value} needs it. Export the model again")
            continue
        if tensor.shape != expected:
            found.problem(name, f"has shape {list(tensor.shape)} and must have {list(expected)}")
        if not spec.accepts(tensor.dtype):
            found.problem(name, f"holds {dtype_name(tensor.dtype)} and must hold {spec.accepted()}")


def _add_kinds(
    layers: Mapping[str, StoredTensor], types: Mapping[str, str], found: Examination
) -> None:
    groups: dict[tuple[str, str, str], list[StoredTensor]] = {}
    for prefix, weight in layers.items():
        if len(weight.shape) < 2:
            continue
        key = (_NUMBER.sub("*", prefix), types[prefix], dtype_name(weight.dtype))
        groups.setdefault(key, []).append(weight)
    found.kinds = [
        LayerKind(name, loads, len(weights), dtype, weights[0].shape)
        for (name, loads, dtype), weights in sorted(groups.items())
    ]


def _check_agreement(
    layers: Mapping[str, StoredTensor], description: QuantDescription, found: Examination
) -> None:
    """Parts that vLLM computes as one product must have one type."""
    for prefix in layers:
        parent, _, name = prefix.rpartition(".")
        for fused, parts in FUSED_LAYERS.items():
            if name != parts[0] or any(f"{parent}.{part}" not in layers for part in parts):
                continue
            _try(lambda p=f"{parent}.{fused}": description.of_layer(p), f"{parent}.{fused}", found)
    for experts in {match["experts"] for prefix in layers if (match := EXPERT.match(prefix))}:
        _try(lambda p=experts: description.of_experts(p), experts, found)


def _try(look_up: Any, subject: str, found: Examination) -> None:
    try:
        look_up()
    except CheckpointError as error:
        found.problem(subject, str(error))
    except CoreError:
        pass  # an unknown type, which has its finding


def _check_entries(
    tensors: Mapping[str, StoredTensor], description: QuantDescription, found: Examination
) -> None:
    absent = sorted(name for name in description.types if name not in tensors)
    if absent:
        found.problem(
            shortened(absent, 6),
            f"{len(absent)} tensors have an entry in the description and are in no file",
        )
