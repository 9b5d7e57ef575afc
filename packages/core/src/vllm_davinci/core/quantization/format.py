"""Descriptions of a checkpoint's layers. Each format is one file of `formats`."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

from vllm_davinci.core.errors import CheckpointError, CoreError
from vllm_davinci.core.quantization.registry import Registry
from vllm_davinci.core.quantization.scheme import SCHEMES, Layout, Scheme, computing_scheme
from vllm_davinci.core.weight_files.files import StoredTensor, read_header, tensor_files
from vllm_davinci.core.weight_files.issues import CheckReport
from vllm_davinci.core.weight_files.layer_names import EXPERT, FUSED_LAYERS, shortened

Weights = Iterable[tuple[str, torch.Tensor]]

_EXPERT_WEIGHT = re.compile(
    r"^(?P<experts>.*\.experts)\.(?P<number>\d{1,9})\.(?P<part>[^.]+)\.weight$"
)
_DECODER_LAYER = re.compile(r"^.*?\.layers\.\d{1,9}\.")


class Checkpoint(NamedTuple):
    """The checkpoint in which a format looks for its description.

    model:        a directory, or a name on the hub
    quantization: config.json's `quantization_config`
    """

    model: str
    revision: str | None = None
    quantization: Mapping[str, Any] = {}

    @property
    def directory(self) -> Path | None:
        path = Path(self.model)
        return path if path.is_dir() else None

    def tensor_names(self) -> list[str]:
        """Names of the checkpoint's tensors, from its headers, or for a hub name from its index."""
        if self.directory is not None:
            files = tensor_files(self.directory)
            return [name for path in files for name in read_header(path)]
        index = get_hf_file_to_dict("model.safetensors.index.json", self.model, self.revision)
        if index is None:
            raise CheckpointError(
                f"{self.model} has no model.safetensors.index.json, which is needed to find its "
                "quantized weights. Download it and name the directory."
            )
        return list(index["weight_map"])


@dataclass(frozen=True)
class Format(ABC):
    """The description of one checkpoint: read once per engine, queried per layer.

    A format needs only a subclass in a file of `formats`, decorated with `FORMATS.register`; a
    format with its own name in vLLM also has a quantization configuration there.

    types:  tensor name -> name of its scheme; a layer has its weight's scheme
    source: the file or model that contains it, for messages
    layout: the exporter's storage layout, if exporters differ
    """

    types: Mapping[str, str]
    source: str
    layout: Layout = field(default_factory=Layout)

    name: ClassVar[str]
    """The format's name in reports."""

    quantizations: ClassVar[frozenset[str]] = frozenset()
    """vLLM's names of the methods that serve it."""

    has_own_file: ClassVar[bool] = False
    """True if a file of the checkpoint has the description, which overrides config.json."""

    @classmethod
    @abstractmethod
    def find(cls, checkpoint: Checkpoint, quantization: str | None) -> Format | None:
        """The description of a checkpoint, or None for one of another format.

        quantization: the entry of `quantizations` that serves it; None if it is only checked
        Raises CheckpointError or UnsupportedFeatureError for a description that cannot be served.
        """

    @abstractmethod
    def converted(self, weights: Weights, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Converts the tensors of the files for the model's loader.

        dtype: of the model
        """

    @abstractmethod
    def check(self, tensors: Mapping[str, StoredTensor], report: CheckReport) -> None:
        """Adds an issue for every tensor that is missing, unexpected or invalid."""

    def whole(self, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """The tensors under the names, and with the shapes, of float weights."""
        return dict(tensors)

    @property
    def label(self) -> str:
        """The format and its source, for reports."""
        return f"{self.name} (config.json)"

    def loads_as(self, prefix: str) -> str:
        """The type as which a layer is loaded, for reports."""
        return self.name

    def renamed(self, rename: Callable[[dict[str, str]], dict[str, str]]) -> Format:
        """A copy with the names of the model's modules instead of the checkpoint's."""
        return replace(self, types=rename(dict(self.types)))

    def of_decodes(self) -> Format:
        """A copy with the layer types of a decode engine (disaggregated prefill)."""
        types = {
            name: SCHEMES[kind].in_decodes
            for name, kind in self.types.items()
            if kind in SCHEMES and SCHEMES[kind].in_decodes and not EXPERT.match(name)
        }
        return replace(self, types={**self.types, **types}) if types else self

    @property
    def has_norm_biases(self) -> bool:
        """True if outliers were moved out of the activations, which gives norms a bias."""
        return any(name.endswith(("norm.bias", "norm.module.bias")) for name in self.types)

    @cached_property
    def quantizes_inputs(self) -> bool:
        """True if some layers multiply integers, so that producers of their inputs may emit
        integers."""
        kinds = {kind for name, kind in self.types.items() if name.endswith(".weight")}
        return any(SCHEMES[kind].quantizes_input for kind in kinds & SCHEMES.keys())

    def of_layer(
        self, prefix: str, fused: Mapping[str, Sequence[str]] | None = None
    ) -> Scheme | None:
        """The scheme of the layer of that name, or None without an entry.

        fused: layers that consist of several in the checkpoint -> their names
        Raises CheckpointError if parts of one layer have different types, and
        UnsupportedFeatureError for an unknown type.
        """
        own = self.types.get(f"{prefix}.weight")
        if own is not None:
            return computing_scheme(own, f"{prefix}.weight")
        parent, _, name = prefix.rpartition(".")
        parts = (fused or {}).get(name) or FUSED_LAYERS.get(name)
        if parts is None:
            return None
        names = [f"{parent}.{part}" if parent else part for part in parts]
        return self._agreed(prefix, {name: self.types.get(f"{name}.weight") for name in names})

    def of_experts(self, prefix: str) -> Scheme | None:
        """The scheme of all routed experts under `<prefix>.<number>`, or None without an entry.

        Some models of vLLM name their experts differently from the checkpoint (MiniMax-M2: `mlp`,
        stored as `block_sparse_moe`): then the decoder layer's only experts are used.
        """
        found = self._expert_types.get(prefix)
        if found is None and (layer := _DECODER_LAYER.match(prefix)):
            same = [name for name in self._expert_types if name.startswith(layer.group())]
            found = self._expert_types[same[0]] if len(same) == 1 else None
        return self._agreed(prefix, found or {}, is_expert=True)

    @cached_property
    def _expert_types(self) -> dict[str, dict[str, str | None]]:
        """Name of a layer's experts -> the type of every part of every expert.

        None marks a part without an entry that another expert of the layer has.
        """
        found: dict[str, dict[str, dict[str, str]]] = {}
        for name, value in self.types.items():
            if match := _EXPERT_WEIGHT.match(name):
                own = found.setdefault(match["experts"], {})
                own.setdefault(match["number"], {})[match["part"]] = value
        completed = {}
        for experts, by_number in found.items():
            # Missing numbers are searched only below a plausible count.
            numbers = {str(number) for number in range(len(by_number))} | by_number.keys()
            parts = dict.fromkeys(part for own in by_number.values() for part in own)
            completed[experts] = {
                f"{experts}.{number}.{part}": by_number.get(number, {}).get(part)
                for number in sorted(numbers, key=int)
                for part in parts
            }
        return completed

    def _agreed(
        self, prefix: str, types: Mapping[str, str | None], is_expert: bool = False
    ) -> Scheme | None:
        schemes: dict[str | None, Scheme | None] = {}
        named: dict[str | None, list[str]] = {}
        for name, value in types.items():
            scheme = None
            if value is not None:
                scheme = computing_scheme(value, f"{name}.weight", is_expert)
            key = None if scheme is None else scheme.name
            schemes[key] = scheme
            named.setdefault(key, []).append(name)
        if len(named) > 1:
            listed = ", ".join(
                f"{shortened(names)} {'no entry' if kind is None else kind}"
                for kind, names in named.items()
            )
            raise CheckpointError(
                f"{prefix} is one product, and its parts have different types in {self.source}: "
                f"{listed}. Export the model again with one type for all of them."
            )
        return next(iter(schemes.values()), None)


FORMATS: Registry[type[Format]] = Registry("formats")


def find_format(checkpoint: Checkpoint, quantization: str | None = None) -> Format | None:
    """The description by the first format that recognizes the checkpoint, or None.

    quantization: vLLM's name of the method that serves it; None: any
    """
    for kind in sorted(FORMATS.values(), key=lambda each: not each.has_own_file):
        if quantization is None or quantization in kind.quantizations:
            try:
                found = kind.find(checkpoint, quantization)
            except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
                if isinstance(error, CoreError):
                    raise
                raise CheckpointError(
                    f"{checkpoint.model} has a quantization description that cannot be read as "
                    f"{kind.name}: {type(error).__name__} {error}. Copy config.json again."
                ) from error
            if found is not None:
                return found
    return None
