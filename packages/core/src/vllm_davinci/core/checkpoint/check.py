"""The checkpoint check: missing, unexpected and contradictory tensors.

Reads configuration, index and headers, no weights.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_davinci.core.checkpoint.config_check import check_against_config
from vllm_davinci.core.errors import CheckpointError, CoreError
from vllm_davinci.core.quantization.format import Checkpoint, Format, find_format
from vllm_davinci.core.quantization.layer_check import check_layer
from vllm_davinci.core.quantization.scheme import FLOAT, Layout, find_scheme
from vllm_davinci.core.quantization.tensors import dtype_name
from vllm_davinci.core.weight_files.files import (
    StoredTensor,
    misplaced_tensors,
    read_config,
    read_header,
    tensor_files,
)
from vllm_davinci.core.weight_files.issues import CheckReport, LayerKind
from vllm_davinci.core.weight_files.layer_names import WRAPPED_NORM, shortened

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|(?<=\.shard_)\d+$")


def check_checkpoint(directory: Path, format: Format | None = None) -> CheckReport:
    """Checks everything that can be checked without reading a weight.

    format: of the checkpoint, if already read
    Bad files do not raise: they become issues of the report.
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
    layers = {
        name.removesuffix(".weight"): tensor
        for name, tensor in tensors.items()
        if name.endswith(".weight") and not WRAPPED_NORM.match(name)
    }
    format = format or _format(directory, config, report)
    if format is not None:
        report.quantization = format.label
        format.check(tensors, report)
        _add_kinds(layers, {prefix: format.loads_as(prefix) for prefix in layers}, report)
        tensors = format.whole(tensors)
    else:
        is_float = report.quantization == "none"
        for prefix, weight in layers.items() if is_float else ():
            floats = find_scheme(FLOAT, prefix)
            check_layer(prefix, weight, floats, Layout(), tensors, report)
        named = FLOAT if is_float else report.quantization.split()[0]
        _add_kinds(layers, dict.fromkeys(layers, named), report)
    check_against_config(config, tensors, report)
    return report


def _format(directory: Path, config: Mapping[str, Any], report: CheckReport) -> Format | None:
    named = quantization_config(config)
    try:
        found = find_format(Checkpoint(str(directory), None, named))
    except CoreError as error:
        report.problem(str(directory), str(error))
        report.quantization = "unknown"
        return None
    if found is None and (method := named.get("quant_method")):
        report.quantization = f"{method} (config.json)"
        report.problem(
            "config.json",
            f"quantization method {method!r} is not available; ascend, compressed-tensors, awq, "
            "gptq and fp8 are. Use a float checkpoint, or vllm-davinci quantize on one",
        )
    return found


def quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section of config.json that names a quantization method; empty without one.

    Some multimodal models store it with their language model; compressed-tensors uses another name.
    """
    text = config.get("text_config")
    sections = (
        config.get("quantization_config"),
        text.get("quantization_config") if isinstance(text, Mapping) else None,
        config.get("compression_config"),
    )
    return next((section for section in sections if isinstance(section, Mapping)), {})


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
