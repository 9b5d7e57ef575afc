"""A checkpoint directory: the tensors in its files, read from headers only."""

import json
import math
import stat
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_davinci.core.errors import CheckpointError

# The index of a float checkpoint, and ModelSlim's.
INDEX_NAME = "model.safetensors.index.json"
QUANTIZED_INDEX_NAME = "quant_model_weights.safetensors.index.json"
# Written next to the shards of some models: the same tensors in another layout.
FOREIGN_FILES = ("consolidated",)

_MOST_BYTES = 1 << 30  # limit for a JSON file
_MOST_HEADER_BYTES = 100_000_000  # limit of the safetensors format
_LARGEST_COUNT = 1 << 62

# The dtype names of the safetensors format that a model may hold.
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class StoredTensor:
    """File, dtype and shape of a tensor."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]


def read_config(directory: Path) -> dict[str, Any]:
    """Reads config.json. Raises CheckpointError if it is missing or invalid."""
    path = directory / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{directory} has no config.json: name a checkpoint directory.")
    return read_json(path)


def read_json(path: Path) -> dict[str, Any]:
    """Reads the JSON object in a file. Raises CheckpointError if it is invalid."""
    try:
        content = json.loads(_regular(path, _MOST_BYTES).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Copy the file again.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must be a JSON object. Copy the file again.")
    return content


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Tensor name -> its entry in the file's header. Raises CheckpointError for a damaged file."""
    size = 0
    try:
        size = _regular(path).stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size, _MOST_HEADER_BYTES):
                raise ValueError(f"its header would have {length} bytes")
            header = json.loads(file.read(length))
        if not isinstance(header, dict):
            raise ValueError("its header is not a JSON object")
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        tensors = {name: _stored(path, name, entry) for name, entry in entries.items()}
        ends = [entry["data_offsets"][1] for entry in entries.values()]
        _check_metadata(header.get("__metadata__"))
        _check_places(entry["data_offsets"] for entry in entries.values())
    except (OSError, ValueError, RecursionError, struct.error) as error:
        raise CheckpointError(
            f"{path} ({size} bytes) is not a safetensors file: {type(error).__name__} {error}. "
            "Copy the file again."
        ) from error
    if (expected := 8 + length + max(ends, default=0)) != size:
        raise CheckpointError(
            f"{path} has {size} bytes and its header describes {expected}: it is cut short or "
            "damaged. Copy the file again."
        )
    return tensors


def _stored(path: Path, name: str, entry: Any) -> StoredTensor:
    """Raises ValueError for an invalid header entry, or one whose bytes do not match its shape."""
    if not isinstance(entry, dict) or str(entry.get("dtype")) not in DTYPES:
        raise ValueError(f"{name} has the entry {str(entry)[:80]}")
    shape, places = entry.get("shape", ()), entry.get("data_offsets", ())
    if not (_are_counts(shape) and _are_counts(places) and len(places) == 2):
        raise ValueError(f"{name} has shape {str(shape)[:80]} and offsets {str(places)[:80]}")
    dtype = DTYPES[str(entry["dtype"])]
    if math.prod(shape) * dtype.itemsize != places[1] - places[0]:
        raise ValueError(f"{name} has shape {shape} in {places[1] - places[0]} bytes")
    return StoredTensor(path, dtype, tuple(shape))


def _check_metadata(metadata: Any) -> None:
    """Raises ValueError for metadata that safetensors refuses: values must be texts."""
    pairs = {} if metadata is None else metadata
    if not isinstance(pairs, dict) or not all(isinstance(text, str) for text in pairs.values()):
        raise ValueError(f"__metadata__ is {str(metadata)[:80]}, and has to map names to texts")


def _check_places(offsets: Iterable[list[int]]) -> None:
    """Raises ValueError if tensors overlap or leave gaps."""
    end = 0
    for begin, next_end in sorted(offsets):
        if begin != end:
            raise ValueError(f"a tensor begins at byte {begin} of the data instead of {end}")
        end = next_end


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST_COUNT
        for value in values
    )


def _regular(path: Path, most_bytes: int | None = None) -> Path:
    """The path of a regular file. Raises OSError for others, and for too large a file."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{path} is not a regular file")
    if most_bytes is not None and found.st_size > most_bytes:
        raise OSError(f"{path} has {found.st_size} bytes; at most {most_bytes} are read")
    return path


def require_files(directory: Path) -> None:
    """Raises CheckpointError for an invalid index, and for weights that are not regular files.

    Reading a pipe would wait forever.
    """
    if index := find_index(directory):
        absent = {name for name in _weight_map(index).values() if not (directory / name).is_file()}
        if absent:
            raise CheckpointError(
                f"{index} names {min(absent)!r}, which is missing. Copy the rest of the checkpoint."
            )
    for path in sorted(directory.glob("*.safetensors")):
        try:
            _regular(path)
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read: {error}. Copy the file again."
            ) from error


def find_index(directory: Path) -> Path | None:
    """The index of a checkpoint's files, or None."""
    paths = (directory / INDEX_NAME, directory / QUANTIZED_INDEX_NAME)
    return next((path for path in paths if path.is_file()), None)


def tensor_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint: those in its index, or all without one.

    Raises CheckpointError if there is none, a file of the index is missing, or there are other
    files.
    """
    found = [
        path
        for path in sorted(directory.glob("*.safetensors"))
        if not path.name.startswith(FOREIGN_FILES)
    ]
    if index := find_index(directory):
        names = sorted(set(_weight_map(index).values()))
        absent = [name for name in names if not (directory / name).is_file()]
        if absent:
            raise CheckpointError(
                f"{index} names {', '.join(absent[:4])}, {len(absent)} of {len(names)} files, "
                "which are missing. Copy the rest of the checkpoint."
            )
        if others := [path.name for path in found if path.name not in names]:
            raise CheckpointError(
                f"{directory} has {', '.join(others[:4])} in addition to the {len(names)} files "
                f"that {index.name} names, and both would be loaded: they belong to two exports. "
                "Move one of them to a directory of its own."
            )
        return [directory / name for name in names]
    if not found:
        raise CheckpointError(f"{directory} holds no *.safetensors file.")
    return found


def misplaced_tensors(directory: Path, tensors: dict[str, StoredTensor]) -> list[str]:
    """Names of tensors that the index assigns to a file whose header lacks them."""
    index = find_index(directory)
    if index is None:
        return []
    places = _weight_map(index)
    return [
        name
        for name, file in places.items()
        if name not in tensors or tensors[name].file.name != file
    ]


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name. Raises CheckpointError for names of no file in the directory."""
    places = read_json(index).get("weight_map", {})
    if not isinstance(places, dict):
        raise CheckpointError(f"weight_map of {index} must be a JSON object. Copy the file again.")
    for name, file in places.items():
        if not isinstance(file, str) or Path(file).name != file or "\0" in file:
            raise CheckpointError(
                f"{index} assigns {name} to {file!r}, and a checkpoint's files must be in its "
                "directory. Copy the file again."
            )
    return places
