"""The description in a ModelSlim export: a quantization type for every tensor of the checkpoint."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from vllm_davinci.core.errors import CheckpointError, UnsupportedFeatureError

FILE_NAME = "quant_model_description.json"
# Earlier exports put the type into the file's name.
FILE_PATTERN = "quant_model_description*.json"

# Keys that describe the export as a whole. All others are tensors.
GLOBAL_KEYS = frozenset(
    {
        "model_quant_type",
        "version",
        "group_size",
        "kv_quant_type",
        "kv_cache_type",
        "fa_quant_type",
        "reduce_quant_type",
        "optional",
        "metadata",
    }
)
# Keys of an export that no engine here serves -> why.
_INT8_CACHE = (
    "CANN documents int8 keys and values on A2 and A3 neither for layout TND nor for bf16 prompts "
    "over a paged cache (aclnnFusedInferAttentionScoreV3, constraints)"
)
UNAVAILABLE_OPTIONS = {
    "kv_quant_type": _INT8_CACHE,
    "kv_cache_type": _INT8_CACHE,
    "fa_quant_type": "attention of int8 queries is left to later releases",
}
# Layers that vLLM computes as one product -> their parts in a checkpoint. A model's own
# `packed_modules_mapping` goes first.
FUSED_LAYERS: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
# A norm into which outliers were moved, as exporters before format 1.0.0 wrote it once more.
WRAPPED_NORM = re.compile(r"^(?P<norm>.*norm)\.module\.(?P<part>weight|bias)$")
_EXPERT_WEIGHT = re.compile(r"^(?P<experts>.*\.experts)\.\d+\.(?P<part>[^.]+)\.weight$")


class QuantType(StrEnum):
    """The format of one layer's weight and of the input of its product, as layers compute it."""

    FLOAT = "FLOAT"
    W8A8 = "W8A8"  # int8 weight; the input's scale and offset are in the checkpoint
    W8A8_DYNAMIC = "W8A8_DYNAMIC"  # int8 weight; every token's scale is found when it comes
    W8A16 = "W8A16"  # int8 weight, which is turned into floats for the product
    W4A16 = "W4A16"  # the same of 4 bits


WEIGHT_ONLY = frozenset({QuantType.W8A16, QuantType.W4A16})


# Types of a checkpoint -> how their layers compute. What is more in the files is converted or left
# out while loading (`checkpoint.conversion`).
LOADED_AS: dict[str, QuantType] = {
    **{kind.value: kind for kind in QuantType},
    # Both: the scales of tokens are for prefills, the checkpoint's for decodes of another engine.
    "W8A8_MIX": QuantType.W8A8_DYNAMIC,
    # The 4-bit integers are int8, too, and their products are the same.
    "W4A8_DYNAMIC": QuantType.W8A8_DYNAMIC,
}


def quant_type(name: str, tensor: str) -> QuantType:
    """How a layer of that type computes. Raises UnsupportedFeatureError, which names the tensor."""
    kind = LOADED_AS.get(name)
    if kind is not None:
        return kind
    close = difflib.get_close_matches(str(name), LOADED_AS, n=1)
    hint = f" Did the export mean {close[0]}?" if close else ""
    raise UnsupportedFeatureError(
        f"{tensor} has quantization type {name!r}, and {', '.join(LOADED_AS)} are supported."
        f"{hint} Export the model again with a supported type for this layer, such as "
        "W8A8_DYNAMIC, or run vllm-davinci quantize on the float checkpoint."
    )


@dataclass(frozen=True)
class QuantDescription:
    """The types of a checkpoint's tensors.

    types:   tensor name -> type name, as in the file
    options: the keys that describe the export as a whole
    source:  the file, for messages
    """

    types: Mapping[str, str]
    options: Mapping[str, Any] = field(default_factory=dict)
    source: str = FILE_NAME

    @classmethod
    def parse(cls, content: Any, source: str = FILE_NAME) -> QuantDescription:
        """From the file's JSON. Raises CheckpointError when it is not a map of names to types."""
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
                f"such as {QuantType.W8A8.value!r}. Copy the file again from the export."
            )
        options = {name: value for name, value in content.items() if name not in types}
        return cls(types, options, source)

    @classmethod
    def load(cls, path: Path) -> QuantDescription:
        """From a file. Raises CheckpointError when it does not read."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} does not read: {error}. Copy the file again from the export."
            ) from error
        found = cls.parse(content, str(path))
        groups = _stored_group_size(path.parent, found.types)
        if groups is None or groups == found.group_size:
            return found
        return replace(found, options={**found.options, "group_size": groups})

    def renamed(self, rename: Callable[[dict[str, str]], dict[str, str]]) -> QuantDescription:
        """With the names of the model's modules in place of the checkpoint's."""
        return QuantDescription(rename(dict(self.types)), self.options, self.source)

    def refuse_unsupported_options(self) -> None:
        """Raises UnsupportedFeatureError for a quantized KV cache or attention."""
        for key, reason in UNAVAILABLE_OPTIONS.items():
            value = self.options.get(key)
            if value not in (None, "", QuantType.FLOAT.value):
                raise UnsupportedFeatureError(
                    f"{self.source} says {key} {value!r}, which is not available: {reason}. Export "
                    "the model without it."
                )

    @property
    def version(self) -> str:
        """Of the format; empty for exporters before 1.0.0."""
        return str(self.options.get("version") or "")

    @property
    def generation(self) -> str:
        """Of the exporter, in words."""
        return f"format {self.version}" if self.version else "format before 1.0.0"

    @property
    def group_size(self) -> int:
        """Entries of the input that share a scale of a weight-only layer; 0: all."""
        return int(self.options.get("group_size") or 0)

    @property
    def has_norm_biases(self) -> bool:
        """Whether outliers were moved out of the activations, which gives norms a bias."""
        return any(name.endswith(("norm.bias", "norm.module.bias")) for name in self.types)

    @property
    def has_dynamic_layers(self) -> bool:
        """Whether some layers quantize every token with its own scale."""
        return any(LOADED_AS.get(type_) is QuantType.W8A8_DYNAMIC for type_ in self.types.values())

    @property
    def has_static_layers(self) -> bool:
        """Whether some layers quantize their input with a scale of the checkpoint."""
        static = QuantType.W8A8.value
        return any(
            type_ == static and name.endswith(".weight") for name, type_ in self.types.items()
        )

    def of_layer(
        self, prefix: str, fused: Mapping[str, Sequence[str]] | None = None
    ) -> QuantType | None:
        """Type of the layer of that name, or None when the file has no entry for it.

        fused: layers that consist of several in the checkpoint -> their names
        Raises CheckpointError when parts of one layer have different types, and
        UnsupportedFeatureError for a type that is not known.
        """
        own = self.types.get(f"{prefix}.weight")
        if own is not None:
            return quant_type(own, f"{prefix}.weight")
        parent, _, name = prefix.rpartition(".")
        parts = (fused or {}).get(name) or FUSED_LAYERS.get(name)
        if parts is None:
            return None
        names = [f"{parent}.{part}" if parent else part for part in parts]
        return self._agreed(prefix, {name: self.types.get(f"{name}.weight") for name in names})

    def of_experts(self, prefix: str) -> QuantType | None:
        """Type of all routed experts under `<prefix>.<number>`, or None without an entry."""
        return self._agreed(prefix, self._expert_types.get(prefix, {}))

    @cached_property
    def _expert_types(self) -> dict[str, dict[str, str | None]]:
        """Name of a layer's experts -> the type of every part of every expert, None without an
        entry."""
        found: dict[str, dict[str, str | None]] = {}
        parts: dict[str, dict[str, None]] = {}
        for name, value in self.types.items():
            if match := _EXPERT_WEIGHT.match(name):
                found.setdefault(match["experts"], {})[name.removesuffix(".weight")] = value
                parts.setdefault(match["experts"], {})[match["part"]] = None
        for experts, types in found.items():
            numbers = {int(name.removeprefix(experts).split(".")[1]) for name in types}
            for number in range(max(numbers) + 1):
                for part in parts[experts]:
                    types.setdefault(f"{experts}.{number}.{part}", None)
        return found

    def _agreed(self, prefix: str, types: Mapping[str, str | None]) -> QuantType | None:
        by_type: dict[QuantType | None, list[str]] = {}
        for name, value in types.items():
            kind = None if value is None else quant_type(value, f"{name}.weight")
            by_type.setdefault(kind, []).append(name)
        if len(by_type) > 1:
            listed = ", ".join(
                f"{shortened(names)} {'no entry' if kind is None else kind.value}"
                for kind, names in by_type.items()
            )
            raise CheckpointError(
                f"{prefix} is one product, and {self.source} gives its parts different types: "
                f"{listed}. Export the model again with one type for all of them."
            )
        return next(iter(by_type), None)


def _stored_group_size(directory: Path, types: Mapping[str, str]) -> int | None:
    """The group size that the first weight-only layer of a directory has, 0 for one group.

    Descriptions from before format 1.0.0 do not say it. None without such a layer, or where files
    do not read, which others tell.
    """
    weights = {name for name, kind in types.items() if LOADED_AS.get(kind) in WEIGHT_ONLY}
    try:
        for path in sorted(directory.glob("*.safetensors")) if weights else ():
            with safe_open(path, "pt") as file:
                names = set(file.keys())
                for name in sorted(weights & names):
                    scale = f"{name}_scale"
                    if not name.endswith(".weight") or scale not in names:
                        continue
                    shape = file.get_slice(scale).get_shape()
                    groups = shape[1] if len(shape) == 2 else 1
                    columns = file.get_slice(name).get_shape()[-1]
                    return columns // groups if groups > 1 else 0
    except (SafetensorError, OSError):
        pass
    return None


def shortened(names: Iterable[str], most: int = 3) -> str:
    """The first few of many names, for a message."""
    listed = list(names)
    rest = len(listed) - most
    return ", ".join(listed[:most]) + (f" and {rest} more" if rest > 0 else "")


def find_description(directory: Path) -> Path | None:
    """The description among a checkpoint's files, or None.

    Raises CheckpointError when there are several: exports of several generations.
    """
    found = sorted(directory.glob(FILE_PATTERN))
    if len(found) > 1:
        raise CheckpointError(
            f"{directory} has {' and '.join(path.name for path in found)}, of two exports. Keep "
            "the one that belongs to these weights."
        )
    return found[0] if found else None
