"""The check of a checkpoint with ModelSlim's description: layers as they say, with all tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm_davinci.core.checkpoint.config_check import EXPERT, VOCABULARY
from vllm_davinci.core.checkpoint.files import StoredTensor
from vllm_davinci.core.checkpoint.issues import CheckReport
from vllm_davinci.core.errors import CheckpointError, CoreError
from vllm_davinci.core.quantization.description import (
    FUSED_LAYERS,
    LOADED_AS,
    WEIGHT_ONLY,
    QuantDescription,
    QuantType,
    quant_type,
    shortened,
)
from vllm_davinci.core.quantization.tensors import STORED_TENSORS, dtype_name, stored_tensors
from vllm_davinci.core.quantization.weight_only import WAY_OUT, refusal_of_groups

_PLAIN = STORED_TENSORS[QuantType.FLOAT.value]
_EXTRA_NAMES = frozenset(
    spec.name for specs in STORED_TENSORS.values() for spec in specs if spec.name != "weight"
) | {"weight_scale_second", "weight_offset_second"}


def layer_types(
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


def check_described(
    layers: Mapping[str, StoredTensor],
    tensors: Mapping[str, StoredTensor],
    description: QuantDescription,
    report: CheckReport,
) -> None:
    """Whether tensors and description agree: no scale without weight, no entry without tensor.

    layers: weights by the name of their layer
    """
    _check_scales_have_weights(layers, tensors, report)
    _check_agreement(layers, description, report)
    _check_entries(tensors, description, report)


def whole_matrices(
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
