"""The check of a compressed-tensors checkpoint: schemes that can be computed, complete layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStrategy,
)
from compressed_tensors.utils.match import is_match
from pydantic import ValidationError

from vllm_davinci.core.checkpoint.files import StoredTensor
from vllm_davinci.core.checkpoint.issues import CheckReport
from vllm_davinci.core.quantization.compressed_schemes import NAME, WAY_OUT, refusal
from vllm_davinci.core.quantization.description import shortened
from vllm_davinci.core.quantization.tensors import dtype_name

_EXPERT = re.compile(r"\.experts\.\d+\.")
_LINEAR = torch.nn.Linear(1, 1, device="meta")  # what a layer of a checkpoint is to the format


@dataclass(frozen=True)
class _Expected:
    """A tensor beside an int8 weight: its shapes, any of which will do."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    is_float: bool = True


def check_compressed(
    content: Mapping[str, Any], tensors: Mapping[str, StoredTensor], report: CheckReport
) -> None:
    """Whether every quantized layer's scheme can be computed and its tensors are there.

    content: `quantization_config` of config.json
    """
    try:
        config = QuantizationConfig.model_validate(content)
    except ValidationError as error:
        report.problem("config.json", f"its {NAME} section does not read: {error.errors()[0]}")
        return
    refused: dict[str, list[str]] = {}
    for name, weight in tensors.items():
        prefix, _, last = name.rpartition(".")
        is_plain = weight.dtype.is_floating_point and weight.dtype.itemsize > 1
        if is_plain or last not in ("weight", "weight_packed"):
            continue
        scheme = _scheme_of(prefix, config.config_groups.values(), config.ignore or [])
        if scheme is None:
            refused.setdefault("no group of config.json has it", []).append(name)
            continue
        is_expert = bool(_EXPERT.search(prefix))
        reason = refusal(scheme.weights, scheme.input_activations, is_expert)
        if reason is None and weight.dtype != torch.int8:
            reason = f"it holds {dtype_name(weight.dtype)} and its scheme says int8"
        if reason is not None:
            refused.setdefault(f"{reason}. {WAY_OUT}", []).append(name)
        elif len(weight.shape) != 2:
            report.problem(name, f"has shape {list(weight.shape)} and must be a matrix")
        else:
            _check_beside(prefix, weight.shape[0], scheme, tensors, report)
    for reason, names in refused.items():
        report.problem(shortened(sorted(names)), reason)


def _scheme_of(
    prefix: str, schemes: Iterable[QuantizationScheme], ignore: list[str]
) -> QuantizationScheme | None:
    return next((one for one in schemes if is_match(prefix, _LINEAR, one.targets, ignore)), None)


def _check_beside(
    prefix: str,
    out_features: int,
    scheme: QuantizationScheme,
    tensors: Mapping[str, StoredTensor],
    report: CheckReport,
) -> None:
    is_channel = scheme.weights.strategy == QuantizationStrategy.CHANNEL
    one: tuple[tuple[int, ...], ...] = ((1,), ())
    expected = [_Expected("weight_scale", ((out_features, 1),) if is_channel else one)]
    if not scheme.input_activations.dynamic:
        expected.append(_Expected("input_scale", one))
        if not scheme.input_activations.symmetric:
            expected.append(_Expected("input_zero_point", one, is_float=False))
    for each in expected:
        name = f"{prefix}.{each.name}"
        tensor = tensors.get(name)
        if tensor is None:
            report.problem(name, "is missing: its scheme in config.json needs it")
        elif tensor.shape not in each.shapes:
            report.problem(
                name, f"has shape {list(tensor.shape)} and must have {list(each.shapes[0])}"
            )
        elif tensor.dtype.is_floating_point != each.is_float:
            kind = "a floating dtype" if each.is_float else "integers"
            report.problem(name, f"holds {dtype_name(tensor.dtype)} and must hold {kind}")
