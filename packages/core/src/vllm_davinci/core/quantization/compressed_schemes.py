"""The schemes of compressed-tensors that layers here compute, and what a checkpoint has of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStrategy,
    QuantizationType,
)
from compressed_tensors.utils.match import is_match
from pydantic import ValidationError

from vllm_davinci.core.checkpoint.files import StoredTensor
from vllm_davinci.core.checkpoint.issues import Examination
from vllm_davinci.core.quantization.description import shortened
from vllm_davinci.core.quantization.tensors import dtype_name

NAME = "compressed-tensors"
WAY_OUT = "Run vllm-davinci quantize on the float checkpoint and serve what it writes"
_EXPERT = re.compile(r"\.experts\.\d+\.")
_LINEAR = torch.nn.Linear(1, 1, device="meta")  # what a layer of a checkpoint is to the format


def refusal(weights: Any, activations: Any, is_expert: bool = False) -> str | None:
    """Why layers of a scheme cannot be computed, or None when they can.

    weights, activations: QuantizationArgs of the format, or None
    """
    if not isinstance(weights, QuantizationArgs):
        return "float weights and quantized activations are not available"
    if weights.num_bits != 8 or weights.type != QuantizationType.INT:
        return (
            f"weights of {weights.num_bits} bits ({weights.type}) are not available; those of 8 "
            "bits (int) are"
        )
    channel, tensor = QuantizationStrategy.CHANNEL, QuantizationStrategy.TENSOR
    if not weights.symmetric or weights.strategy not in (
        (channel,) if is_expert else (channel, tensor)
    ):
        symmetry = "symmetric" if weights.symmetric else "asymmetric"
        return (
            f"{symmetry} int8 weights with a scale per {weights.strategy} are not available; "
            f"symmetric ones with a scale per channel{'' if is_expert else ' or tensor'} are"
        )
    if not isinstance(activations, QuantizationArgs):
        return "int8 weights and float activations are not available; int8 activations are"
    is_int8 = activations.num_bits == 8 and activations.type == QuantizationType.INT
    expected = QuantizationStrategy.TOKEN if activations.dynamic else tensor
    if not is_int8 or activations.strategy != expected:
        return (
            f"activations of {activations.num_bits} bits ({activations.type}) with a "
            f"{'dynamic' if activations.dynamic else 'static'} scale per {activations.strategy} "
            "are not available; int8 with a dynamic one per token or a static one per tensor are"
        )
    if is_expert and not (activations.dynamic and activations.symmetric):
        return (
            "static or asymmetric activations are not available; dynamic symmetric ones of tokens "
            "are"
        )
    return None


@dataclass(frozen=True)
class _Expected:
    """A tensor beside an int8 weight: its shapes, any of which will do."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    is_float: bool = True


def check_compressed(
    content: Mapping[str, Any], tensors: Mapping[str, StoredTensor], found: Examination
) -> None:
    """Whether every quantized layer's scheme can be computed and its tensors are there.

    content: `quantization_config` of config.json
    """
    try:
        config = QuantizationConfig.model_validate(content)
    except ValidationError as error:
        found.problem("config.json", f"its {NAME} section does not read: {error.errors()[0]}")
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
            found.problem(name, f"has shape {list(weight.shape)} and must be a matrix")
        else:
            _check_beside(prefix, weight.shape[0], scheme, tensors, found)
    for reason, names in refused.items():
        found.problem(shortened(sorted(names)), reason)


def _scheme_of(
    prefix: str, schemes: Iterable[QuantizationScheme], ignore: list[str]
) -> QuantizationScheme | None:
    return next((one for one in schemes if is_match(prefix, _LINEAR, one.targets, ignore)), None)


def _check_beside(
    prefix: str,
    out_features: int,
    scheme: QuantizationScheme,
    tensors: Mapping[str, StoredTensor],
    found: Examination,
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
            found.problem(name, "is missing: its scheme in config.json needs it")
        elif tensor.shape not in each.shapes:
            found.problem(
                name, f"has shape {list(tensor.shape)} and must have {list(each.shapes[0])}"
            )
        elif tensor.dtype.is_floating_point != each.is_float:
            kind = "a floating dtype" if each.is_float else "integers"
            found.problem(name, f"holds {dtype_name(tensor.dtype)} and must hold {kind}")
