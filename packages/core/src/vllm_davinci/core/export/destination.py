"""The files of an export: their names, and writing all of them or none."""

import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from vllm_davinci.core.errors import CheckpointError

PARTIAL_NAME = ".partial"


def quantized_file_name(number: int, count: int) -> str:
    """ModelSlim's file name of a shard; number: from 1"""
    return f"quant_model_weights-{number:05d}-of-{count:05d}.safetensors"


def file_name(number: int, count: int) -> str:
    """File name of a shard of a float checkpoint; number: from 1"""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Writes a safetensors file. Raises OSError if the system refuses it."""
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path.name}: {error}") from error


@contextmanager
def written_as_a_whole(destination: Path) -> Iterator[Path]:
    """A directory inside `destination` whose files move up when the block ends.

    If the block raises, all its files are removed, and `destination` too if it is new.
    Raises CheckpointError if the system refuses a file, for example on a full disk.
    """
    is_new = not destination.exists()
    partial = destination / PARTIAL_NAME  # in `destination`: moving copies nothing
    try:
        partial.mkdir(parents=True)
        yield partial
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if is_new and destination.is_dir():
            destination.rmdir()
        if isinstance(error, OSError):
            raise CheckpointError(
                f"{destination} is not written, and its files are removed: {error}. Name a "
                "directory that you may write to, on a disk with enough space."
            ) from error
        raise
    for path in sorted(partial.iterdir()):
        path.replace(destination / path.name)
    partial.rmdir()


def require_room(destination: Path, num_bytes: int) -> None:
    """Raises CheckpointError if the file system of `destination` has fewer bytes free."""
    existing = next(path for path in (destination, *destination.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < num_bytes:
        raise CheckpointError(
            f"{destination} needs {math.ceil(num_bytes / 2**20)} MiB at least, and its disk has "
            f"{free // 2**20} MiB free. Name a DESTINATION on another disk, or make room."
        )
