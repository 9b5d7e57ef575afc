"""Merges several processes' timelines of the modelled clock."""

import json
import pathlib
from collections.abc import Sequence

from vllm_davinci.vnpu.errors import TraceError
from vllm_davinci.vnpu.timeline import lines_of

SUFFIX = ".timeline.json"


def merge(sources: Sequence[pathlib.Path], destination: pathlib.Path) -> int:
    """Merges `sources`, files or directories, into one file; returns its number of tasks.

    Devices are ordered by number, whatever their process, so that the same run gives the same
    bytes. Raises TraceError if there are no tasks or a file cannot be read.
    """
    files = [
        file
        for source in sources
        for file in (sorted(source.glob(f"*{SUFFIX}")) if source.is_dir() else [source])
    ]
    parts = [lines for lines in map(_events_of, files) if lines]
    parts.sort(key=lambda lines: (_device(lines[0]), lines))
    count = sum(line.startswith('{"ph":"X"') for lines in parts for line in lines)
    if count == 0:
        raise TraceError(
            f"{', '.join(map(str, sources))}: no modelled tasks. Did the command run something "
            "on a device, and end normally?"
        )
    text = ",\n".join(line for lines in parts for line in lines)
    destination.write_text(f"[\n{text}\n]\n", encoding="utf-8")
    return count


def _events_of(file: pathlib.Path) -> list[str]:
    """The lines that hold events, unparsed."""
    lines = lines_of(file, "timeline")
    return [line.rstrip(",") for line in lines if line.startswith("{")]


def _device(line: str) -> int:
    return int(json.loads(line)["pid"])
