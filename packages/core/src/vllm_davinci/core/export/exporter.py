"""Writes a quantized checkpoint in ModelSlim's format from a float one, by round-to-nearest."""

import json
import math
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from vllm_davinci.core.checkpoint.check import check_checkpoint
from vllm_davinci.core.checkpoint.config_check import text_config
from vllm_davinci.core.errors import CheckpointError, UnsupportedFeatureError
from vllm_davinci.core.export.destination import (
    file_name,
    quantized_file_name,
    require_room,
    save_tensors,
    written_as_a_whole,
)
from vllm_davinci.core.export.fused_experts import find_fused_experts
from vllm_davinci.core.export.layer_types import UNREACHED, LayerTypes
from vllm_davinci.core.export.pairs import Fold
from vllm_davinci.core.export.source import (
    floats_of_fp8,
    read_tensor,
    require_float,
    require_inside,
    source_fp8,
)
from vllm_davinci.core.quantization.config import DESCRIPTION
from vllm_davinci.core.quantization.fp8 import DTYPE as FP8
from vllm_davinci.core.quantization.fp8 import is_scale, scale_of, table_of
from vllm_davinci.core.quantization.rounding import FloatLayer, InputRange
from vllm_davinci.core.quantization.scheme import FLOAT, SCHEMES, Scheme, find_scheme
from vllm_davinci.core.quantization.tensors import dtype_name
from vllm_davinci.core.weight_files.files import (
    INDEX_NAME,
    QUANTIZED_INDEX_NAME,
    StoredTensor,
    read_config,
    read_header,
    tensor_files,
)

MODEL_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
FORMAT_VERSION = "1.0.0"
TABLE_DTYPE = "ple_embedding_dtype"  # vLLM's key in a text configuration


@dataclass(frozen=True)
class Exported:
    """The result of one export."""

    directory: Path
    counts: dict[str, int]  # layers per type
    num_bytes: int
    source_bytes: int


@dataclass
class Exporter:
    """One export.

    kind:   scheme of the projections, one of `written_types`; FLOAT only for fp8 weights, which
            become floats. Other types keep tables of n-grams in fp8. With W8A8, routed experts
            become W8A8_DYNAMIC: few tokens reach each expert, so a range from a short text would
            clip other inputs. The same holds for layers after config.json's `num_hidden_layers`
    dtype:  of the tensors that stay floats
    ranges: layer -> range of its input, for static layers
    types:  layer -> type, if calibration chose another one
    folds:  tensor -> factors applied before rounding
    """

    source: Path
    destination: Path
    kind: str
    dtype: torch.dtype
    ranges: Mapping[str, InputRange] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)
    folds: Mapping[str, Fold] = field(default_factory=dict)

    def require_room(self) -> None:
        """Raises CheckpointError if the disk lacks room for one or two bytes per entry."""
        shapes = (t.shape for path in tensor_files(self.source) for t in read_header(path).values())
        size = 2 if self.kind == FLOAT else 1
        require_room(self.destination, size * sum(map(math.prod, shapes)))

    def run(self, advance: Callable[[int], None]) -> Exported:
        """Reads tensor by tensor, writes file by file. Leaves no files behind if it fails.

        advance: called after each tensor with its bytes in the source
        Raises CheckpointError if the source is not a float checkpoint or the result is incomplete.
        """
        self.require_room()
        with written_as_a_whole(self.destination) as directory:
            return self._write(directory, advance)

    def _write(self, directory: Path, advance: Callable[[int], None]) -> Exported:
        config = read_config(self.source)
        files = tensor_files(self.source)
        headers = {path: read_header(path) for path in files}
        stored = {name: tensor for header in headers.values() for name, tensor in header.items()}
        self._fp8 = source_fp8(config)
        if self._fp8 is None:
            require_float(self.source, config, stored)
            if self.kind == FLOAT:
                raise CheckpointError(
                    f"--type {FLOAT} needs a source with fp8 weights, and {self.source} holds "
                    f"floats. Choose --type {', '.join(set(written_types()) - {FLOAT})}."
                )
        _require_whole(self.source, self.source)
        self._fused = find_fused_experts(
            {name: tensor for name, tensor in stored.items() if not is_scale(name)}
        )
        self._types = LayerTypes(self.kind, config, self.types)
        tables = [name for name, entry in stored.items() if entry.dtype == FP8 and table_of(name)]
        self._kept = set[str]()
        if tables and self.kind != FLOAT:
            self._kept = {*tables, *(scale_of(name, stored) or "" for name in tables)}
        description: dict[str, Any] = {
            "version": FORMAT_VERSION,
            "model_quant_type": self.kind,
            "metadata": {},
            "group_size": 0,
            "optional": {},
        }
        places: dict[str, str] = {}
        matrices: list[str] = []
        total = 0
        for number, (path, header) in enumerate(headers.items(), 1):
            written = self._file(path, header, stored, description, advance)
            file_name = self._file_name(number, len(headers))
            save_tensors(written, directory / file_name)
            places |= dict.fromkeys(written, file_name)
            total += sum(tensor.nbytes for tensor in written.values())
            matrices += [
                name
                for name, value in written.items()
                if name.endswith(".weight") and value.dim() > 1
            ]
        self._copy_rest(directory, config)
        index = {"metadata": {"total_size": total}, "weight_map": places}
        if self.kind == FLOAT:
            _write_json(directory / INDEX_NAME, index)
        else:
            _write_json(directory / QUANTIZED_INDEX_NAME, index)
            _write_json(directory / DESCRIPTION, description)
        _require_whole(directory, self.source)
        counts = dict(Counter(description[name] for name in matrices))
        return Exported(self.destination, counts, total, sum(path.stat().st_size for path in files))

    def _file_name(self, number: int, count: int) -> str:
        name = file_name if self.kind == FLOAT else quantized_file_name
        return name(number, count)

    def _file(
        self,
        path: Path,
        header: Mapping[str, StoredTensor],
        stored: Mapping[str, StoredTensor],
        description: dict[str, Any],
        advance: Callable[[int], None],
    ) -> dict[str, torch.Tensor]:
        """The tensors that replace those of a file, and their entries in the description."""
        written: dict[str, torch.Tensor] = {}
        with safe_open(path, framework="pt") as file:
            for stored_name in header:
                tensor = file.get_tensor(stored_name)
                size = tensor.nbytes
                if stored_name in self._kept:
                    written[stored_name], description[stored_name] = tensor, FLOAT
                    advance(size)
                    continue
                if self._fp8 is not None and is_scale(stored_name):
                    advance(size)
                    continue  # already read with its weight
                if tensor.dtype == FP8:
                    assert self._fp8 is not None
                    tensor = floats_of_fp8(stored_name, tensor, stored, self._fp8)
                experts = self._fused.get(stored_name)
                own = (
                    [(stored_name, tensor)]
                    if experts is None
                    else experts.separate(stored_name, tensor)
                )
                for name, value in own:
                    kind = self._types.of(name, value.shape, value.dtype)
                    for result_name, result in self._results(name, value, kind, stored).items():
                        written[result_name] = result.contiguous()
                        description[result_name] = kind
                advance(size)
        return written

    def _results(
        self, name: str, tensor: torch.Tensor, kind: str, stored: Mapping[str, StoredTensor]
    ) -> dict[str, torch.Tensor]:
        """The tensors that replace one of the model's tensors."""
        if name in self.folds:
            folded = self.folds[name].applied(tensor)
            tensor = folded.to(tensor.dtype) if kind == FLOAT else folded
        if kind == FLOAT:
            if name.endswith(".bias") and self._is_quantized(name.removesuffix(".bias"), stored):
                return {name: tensor.to(torch.float32)}
            # For example, routing biases stay fp32 if the source has them in fp32.
            narrows = tensor.dtype in (torch.float32, torch.float64) and tensor.dim() > 1
            return {name: tensor.to(self.dtype) if narrows else _same_kind(tensor, self.dtype)}
        prefix = name.removesuffix(".weight")
        if not bool(tensor.isfinite().all()):
            raise CheckpointError(
                f"{name} of {self.source} holds values that are not finite and cannot be rounded "
                "to integers. Copy the checkpoint again."
            )
        layer = self._layer(prefix, tensor, kind, stored)
        return {f"{prefix}.{part}": value for part, value in layer.items()}

    def _is_quantized(self, prefix: str, stored: Mapping[str, StoredTensor]) -> bool:
        name = f"{prefix}.weight"
        weight = stored.get(name)
        if weight is None:
            return False
        return self._types.of(name, weight.shape, weight.dtype) != FLOAT

    def _layer(
        self, prefix: str, weight: torch.Tensor, kind: str, stored: Mapping[str, StoredTensor]
    ) -> dict[str, torch.Tensor]:
        scheme = find_scheme(kind, f"{prefix}.weight")
        if not scheme.needs_input_range:
            return scheme.rounded(FloatLayer(weight, self.dtype))
        if prefix not in self.ranges:
            raise CheckpointError(
                f"The calibration text never reached {prefix}, so its input has no range. Use a "
                f"longer text, or --type {UNREACHED}, which needs none."
            )
        bias = read_tensor(stored, f"{prefix}.bias")
        if bias is not None and f"{prefix}.bias" in self.folds:
            bias = self.folds[f"{prefix}.bias"].applied(bias)
        return scheme.rounded(FloatLayer(weight, self.dtype, bias, self.ranges[prefix]))

    def _copy_rest(self, directory: Path, config: dict[str, Any]) -> None:
        """Copies tokenizer, generation settings and model code; config.json with its new dtype."""
        for path in sorted(self.source.iterdir()):
            is_weights = path.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf")
            if path.is_file() and not is_weights and path.name not in (INDEX_NAME, "config.json"):
                require_inside(self.source, path)
                shutil.copy2(path, directory / path.name)
        name = next(key for key, dtype in MODEL_DTYPES.items() if dtype == self.dtype)
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        kept = {name: value for name, value in config.items() if name != "quantization_config"}
        if self._kept:
            text = {**text_config(kept), TABLE_DTYPE: dtype_name(FP8)}
            kept = {**kept, "text_config": text} if "text_config" in kept else text
        _write_json(directory / "config.json", {**kept, key: name})


def _require_whole(directory: Path, source: Path) -> None:
    """Raises CheckpointError if a checkpoint (`source` or the result) could not be loaded."""
    if problems := check_checkpoint(directory).problems():
        told = "is" if directory == source else "becomes something that is"
        raise CheckpointError(
            f"{source} {told} not complete, and the result is removed: {'; '.join(problems[:5])}. "
            "For details run vllm-davinci check-model on the source."
        )


def written_types() -> list[str]:
    """The schemes that an export supports."""
    return sorted(name for name, scheme in SCHEMES.items() if scheme.is_written)


def written_scheme(name: str) -> Scheme:
    """The scheme of that name. Raises UnsupportedFeatureError if exports do not support it."""
    if name in written_types():
        return SCHEMES[name]()
    raise UnsupportedFeatureError(
        f"--type {name} is not written. Choose one of {', '.join(written_types())}."
    )


def model_dtype(config: Mapping[str, Any], asked: str | None) -> torch.dtype:
    """The dtype to write: the requested one, else the configuration's if it has 16 bits."""
    name = asked or str(config.get("dtype") or config.get("torch_dtype") or "")
    return MODEL_DTYPES.get(name.removeprefix("torch."), torch.bfloat16)


def _same_kind(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Converts a 16-bit tensor to the model's dtype; returns others unchanged."""
    return tensor.to(dtype) if tensor.dtype in MODEL_DTYPES.values() else tensor


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
