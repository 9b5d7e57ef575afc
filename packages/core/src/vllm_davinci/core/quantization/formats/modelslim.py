"""ModelSlim's exports: quant_model_description.json has a type for every tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

from vllm_davinci.core.errors import CheckpointError, CoreError, UnsupportedFeatureError
from vllm_davinci.core.quantization.config import DESCRIPTION, DESCRIPTIONS, NAME
from vllm_davinci.core.quantization.format import FORMATS, Checkpoint, Format, Weights
from vllm_davinci.core.quantization.fp8 import DTYPE as FP8
from vllm_davinci.core.quantization.fp8 import missing_scale
from vllm_davinci.core.quantization.layer_check import check_layer, extra_names
from vllm_davinci.core.quantization.scheme import (
    FLOAT,
    SCHEMES,
    Layout,
    computing_scheme,
    find_scheme,
)
from vllm_davinci.core.weight_files.files import StoredTensor, read_header, read_json, tensor_files
from vllm_davinci.core.weight_files.issues import CheckReport
from vllm_davinci.core.weight_files.layer_names import EXPERT, FUSED_LAYERS, WRAPPED_NORM, shortened

# Keys that describe the export as a whole. All others are tensors.
GLOBAL_KEYS = frozenset(
    {
        "model_quant_type",
        "version",
        "group_size",
        "kv_quant_type",
        "kv_cache_type",
        "fa_quant_type",
        "indexer_quant_type",
        "reduce_quant_type",
        "optional",
        "metadata",
    }
)
# Options of an export that this release does not support -> reason.
_INT8_CACHE = (
    "CANN documents int8 keys and values on A2 and A3 neither for layout TND nor for bf16 prompts "
    "over a paged cache (aclnnFusedInferAttentionScoreV3, constraints)"
)
UNAVAILABLE_OPTIONS = {
    "kv_quant_type": _INT8_CACHE,
    "kv_cache_type": _INT8_CACHE,
    "fa_quant_type": "attention of int8 queries is left to later releases",
}


@FORMATS.register
@dataclass(frozen=True)
class QuantDescription(Format):
    """A description file. options: the keys about the whole export"""

    options: Mapping[str, Any] = field(default_factory=dict)

    name = NAME
    quantizations = frozenset({NAME})
    has_own_file = True

    @classmethod
    def find(cls, checkpoint: Checkpoint, quantization: str | None) -> QuantDescription | None:
        if checkpoint.directory is not None:
            path = find_description(checkpoint.directory)
            found = None if path is None else cls.load(path)
        else:
            content = get_hf_file_to_dict(DESCRIPTION, checkpoint.model, checkpoint.revision)
            found = (
                None if content is None else cls.parse(content, f"{checkpoint.model}/{DESCRIPTION}")
            )
        if found is not None:
            found.refuse_unsupported_options()
        return found

    @classmethod
    def parse(cls, content: Any, source: str = DESCRIPTION) -> QuantDescription:
        """Parses the file's JSON. Raises CheckpointError if it is not a map of names to types."""
        if not isinstance(content, Mapping):
            raise CheckpointError(
                f"{source} holds a {type(content).__name__}, and must be a JSON object of tensor "
                "names and their quantization types. Copy the file again from the export."
            )
        types = {
            name: value
            for name, value in content.items()
            if name not in GLOBAL_KEYS and isinstance(value, str)
        }
        odd = [
            name
            for name, value in content.items()
            if name.endswith(".weight") and not isinstance(value, str)
        ]
        if odd:
            raise CheckpointError(
                f"{source} gives {odd[0]} the type {content[odd[0]]!r}, and a type is a string "
                "such as 'W8A8'. Copy the file again from the export."
            )
        options = {name: value for name, value in content.items() if name not in types}
        group_size = options.get("group_size") or 0
        if not isinstance(group_size, int) or group_size < 0:
            raise CheckpointError(
                f"{source} gives group_size the value {group_size!r}, which is not a number of "
                "entries. Copy the file again from the export."
            )
        return cls(types, source, Layout(str(options.get("version") or ""), group_size), options)

    @classmethod
    def load(cls, path: Path) -> QuantDescription:
        """Reads a file. Raises CheckpointError if it cannot be read."""
        found = cls.parse(read_json(path), str(path))
        groups = _stored_group_size(path.parent, found.types)
        if groups is None or groups == found.layout.group_size:
            return found
        return replace(found, layout=replace(found.layout, group_size=groups))

    def refuse_unsupported_options(self) -> None:
        """Raises UnsupportedFeatureError for a quantized KV cache or attention."""
        for key, reason in UNAVAILABLE_OPTIONS.items():
            value = self.options.get(key)
            if value not in (None, "", FLOAT):
                raise UnsupportedFeatureError(
                    f"{self.source} says {key} {value!r}, which is not supported: {reason}. Export"
                    " the model without it."
                )

    @property
    def label(self) -> str:
        version = self.layout.version
        generation = f"format {version}" if version else "format before 1.0.0"
        return f"{NAME} ({Path(self.source).name}, {generation})"

    def loads_as(self, prefix: str) -> str:
        stored = self.types.get(f"{prefix}.weight", FLOAT)
        try:
            computed = computing_scheme(stored, prefix, EXPERT.match(prefix) is not None).name
        except UnsupportedFeatureError:
            return f"{stored} (unknown)"
        return computed if computed == stored else f"{computed} ({stored})"

    def converted(self, weights: Weights, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """See Format. Raises UnsupportedFeatureError for asymmetric weights of symmetric types."""
        wrapped_norms = {
            match["norm"] for name in self.types if (match := WRAPPED_NORM.match(name))
        }
        for name, tensor in weights:
            prefix, _, part = name.rpartition(".")
            if match := WRAPPED_NORM.match(name):
                yield f"{match['norm']}.{match['part']}", tensor
                continue
            if prefix in wrapped_norms and part in ("weight", "bias"):
                continue  # a copy of the wrapped norm's values
            kind = self.types.get(f"{prefix}.weight", FLOAT)
            if kind not in SCHEMES:  # a layer that the model does not have, or that it refused
                yield name, tensor
                continue
            scheme = SCHEMES[kind]()
            convert = scheme.converted_of_expert if EXPERT.match(prefix) else scheme.converted
            result = convert(part, tensor, self.layout)
            if result is not None:
                yield name, result
            elif part == "weight_offset" and bool(tensor.any()):
                raise UnsupportedFeatureError(
                    f"{name} is not zero: the weight is asymmetric, and {kind} multiplies "
                    "symmetric ones. Export the model with symmetric weights."
                )

    def whole(self, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        found = dict(tensors)
        for name, tensor in tensors.items():
            kind = self.types.get(name, "")
            if name.endswith(".weight") and kind in SCHEMES and len(tensor.shape) == 2:
                extent = SCHEMES[kind]().stored(self.layout)[0].extent
                shape = extent.matrix((tensor.shape[0], tensor.shape[1]))
                found[name] = replace(tensor, shape=shape)
        return found

    def check(self, tensors: Mapping[str, StoredTensor], report: CheckReport) -> None:
        """Checks that tensors and description agree: scales have weights, entries have tensors.

        Every layer must have the tensors of its type, and the parts of one product the same type.
        """
        layers = {
            name.removesuffix(".weight"): tensor
            for name, tensor in tensors.items()
            if name.endswith(".weight") and not WRAPPED_NORM.match(name)
        }
        for prefix, weight in layers.items():
            try:
                kind = self.types.get(f"{prefix}.weight", FLOAT)
                scheme = find_scheme(kind, f"{prefix}.weight")
            except UnsupportedFeatureError as error:
                report.problem(f"{prefix}.weight", str(error))
                continue
            check_layer(prefix, weight, scheme, self.layout, tensors, report)
        without_entry = sorted(
            prefix
            for prefix, weight in layers.items()
            if len(weight.shape) > 1 and f"{prefix}.weight" not in self.types
        )
        if without_entry:
            report.note(
                shortened(without_entry, 6), f"no entry in the description: loaded as {FLOAT}"
            )
        self._check_scales_have_weights(layers, tensors, report)
        self._check_agreement(layers, report)
        absent = sorted(name for name in self.types if name not in tensors)
        if absent:
            report.problem(
                shortened(absent, 6),
                f"{len(absent)} tensors have an entry in the description and are in no file",
            )

    def _check_scales_have_weights(
        self,
        layers: Mapping[str, StoredTensor],
        tensors: Mapping[str, StoredTensor],
        report: CheckReport,
    ) -> None:
        lacking: dict[str, str] = {}
        extra = extra_names()
        of_fp8 = {
            missing_scale(f"{prefix}.weight")
            for prefix, weight in layers.items()
            if weight.dtype == FP8
        }
        for name in sorted(of_fp8 - tensors.keys()):
            report.problem(name, "is missing: the weight is fp8")
        for name in tensors.keys() - of_fp8:
            prefix, _, part = name.rpartition(".")
            if part in extra and prefix not in layers:
                lacking.setdefault(f"{prefix}.weight", name)
        for weight, name in lacking.items():
            report.problem(weight, f"is missing, and {name} is there")

    def _check_agreement(self, layers: Mapping[str, StoredTensor], report: CheckReport) -> None:
        """Parts that vLLM computes as one product must have one type."""
        products = {
            f"{parent}.{fused}": self.of_layer
            for prefix in layers
            for parent, _, name in [prefix.rpartition(".")]
            for fused, parts in FUSED_LAYERS.items()
            if name == parts[0] and all(f"{parent}.{part}" in layers for part in parts)
        }
        experts = {match["experts"] for prefix in layers if (match := EXPERT.match(prefix))}
        for prefix, look_up in {**products, **dict.fromkeys(experts, self.of_experts)}.items():
            try:
                look_up(prefix)
            except CheckpointError as error:
                report.problem(prefix, str(error))
            except CoreError:
                pass  # an unknown type, which has its own issue


def _stored_group_size(directory: Path, types: Mapping[str, str]) -> int | None:
    """The group size of a directory's first weight-only layer; 0 for one group.

    Descriptions before format 1.0.0 do not state it. None without such a layer, or if files cannot
    be read, which other checks report.
    """
    grouped = {name for name, kind in types.items() if kind in SCHEMES and SCHEMES[kind].has_groups}
    try:
        for path in tensor_files(directory) if grouped else ():
            header = read_header(path)
            for name in sorted(grouped & header.keys()):
                scale = header.get(f"{name}_scale")
                if name.endswith(".weight") and scale is not None:
                    groups = scale.shape[1] if len(scale.shape) == 2 else 1
                    return header[name].shape[-1] // groups if groups > 1 else 0
    except CheckpointError:
        pass
    return None


def find_description(directory: Path) -> Path | None:
    """The description among a checkpoint's files, or None.

    Raises CheckpointError if there are several, from exports of several generations.
    """
    found = sorted(directory.glob(DESCRIPTIONS))
    if len(found) > 1:
        raise CheckpointError(
            f"{directory} has {' and '.join(path.name for path in found)}, from two exports. "
            "Delete the one that does not belong to these weights."
        )
    return found[0] if found else None
