"""The files that an export writes: their names, and all of them or none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PARTIAL_NAME = ".partial"


def quantized_file_name(number: int, count: int) -> str:
    """The name that ModelSlim gives to the shard of that number, from 1 on."""
    return f"quant_model_weights-{number:05d}-of-{count:05d}.safetensors"


def file_name(number: int, count: int) -> str:
    """The name of the shard of that number of a float checkpoint, from 1 on."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


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
