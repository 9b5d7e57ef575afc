"""A checkpoint directory: the tensors in its files, by headers alone; writing a new one."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_davinci.core.errors import CheckpointError

# The index of a float checkpoint, and ModelSlim's.
INDEX_NAME = "model.safetensors.index.json"
QUANTIZED_INDEX_NAME = "quant_model_weights.safetensors.index.json"
# Written beside the shards of some models: the same tensors in another layout.
FOREIGN_FILES = ("consolidated",)

PARTIAL_NAME = ".partial"

# The dtype names of the safetensors format that a model may hold.
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is and what it looks like."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]


def read_config(directory: Path) -> dict[str, Any]:
    """config.json. Raises CheckpointError when there is none or it does not read."""
    path = directory / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{directory} has no config.json: name a checkpoint directory.")
    return _json(path)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Tensor name -> what the file's header says. Raises CheckpointError for a damaged file."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size:
                raise ValueError(f"its header would have {length} bytes")
            header = json.loads(file.read(length))
        tensors = {
            name: StoredTensor(path, DTYPES[entry["dtype"]], tuple(entry["shape"]))
            for name, entry in header.items()
            if name != "__metadata__"
        }
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name in tensors]
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
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


def quantized_file_name(number: int, count: int) -> str:
    """The name that ModelSlim gives to the shard of that number, from 1 on."""
    return f"quant_model_weights-{number:05d}-of-{count:05d}.safetensors"


def file_name(number: int, count: int) -> str:
    """The name of the shard of that number of a float checkpoint, from 1 on."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def find_index(directory: Path) -> Path | None:
    """The index of a checkpoint's files, or None."""
    paths = (directory / INDEX_NAME, directory / QUANTIZED_INDEX_NAME)
    return next((path for path in paths if path.is_file()), None)


def tensor_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint: those of its index, or else all of them.

    Raises CheckpointError when there is none, a file of the index is not there, or there are others
    beside those.
    """
    found = [
        path
        for path in sorted(directory.glob("*.safetensors"))
        if not path.name.startswith(FOREIGN_FILES)
    ]
    if index := find_index(directory):
        names = sorted(set(_json(index).get("weight_map", {}).values()))
        absent = [name for name in names if not (directory / name).is_file()]
        if absent:
            raise CheckpointError(
                f"{index} names {', '.join(absent[:4])}, {len(absent)} of {len(names)} files, that "
                "are not there. Copy the rest of the checkpoint."
            )
        if others := [path.name for path in found if path.name not in names]:
            raise CheckpointError(
                f"{directory} has {', '.join(others[:4])} beside the {len(names)} files that "
                f"{index.name} names, and both would be loaded: they are of two exports. Move one "
                "of them to a directory of its own."
            )
        return [directory / name for name in names]
    if not found:
        raise CheckpointError(f"{directory} holds no *.safetensors file.")
    return found


def misplaced_tensors(directory: Path, tensors: dict[str, StoredTensor]) -> list[str]:
    """Names that the index puts into a file whose header does not have them."""
    index = find_index(directory)
    if index is None:
        return []
    places = _json(index).get("weight_map", {})
    return [
        name
        for name, file in places.items()
        if name not in tensors or tensors[name].file.name != file
    ]


@contextmanager
def written_as_a_whole(destination: Path) -> Iterator[Path]:
    """A directory inside of `destination` whose files move up when the block ends.

    When the block raises, nothing of it stays, nor `destination` if it is new.
    """
    is_new = not destination.exists()
    partial = destination / PARTIAL_NAME  # on the same file system, so that moving copies nothing
    partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial)
        if is_new:
            destination.rmdir()
        raise
    for path in sorted(partial.iterdir()):
        path.replace(destination / path.name)
    partial.rmdir()


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} does not read: {error}. Copy the file again.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must be a JSON object. Copy the file again.")
    return content
