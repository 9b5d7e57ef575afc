"""Counts of the host's launches, waits for a device and copies from it."""

import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vllm_davinci.vnpu import _C

_SUFFIX = ".counts"
_NUMBERS = struct.Struct("=3Q")  # csrc/device/host_counts.h
_LONGEST_NAME = 48


@dataclass
class HostCounts:
    """Counts since a process began, or of a block of code.

    launches:         tasks launched on streams; a graph replay counts once, events do not count
    synchronizations: waits for streams, events and devices, even if nothing is pending
    copies_to_host:   copies from a device's memory, asynchronous ones included
    """

    launches: int = 0
    synchronizations: int = 0
    copies_to_host: int = 0

    @classmethod
    def now(cls) -> "HostCounts":
        """Counts of this process since it began."""
        return cls(**_C.host_counts())

    def __sub__(self, earlier: "HostCounts") -> "HostCounts":
        return HostCounts(
            self.launches - earlier.launches,
            self.synchronizations - earlier.synchronizations,
            self.copies_to_host - earlier.copies_to_host,
        )


@contextmanager
def counted() -> Iterator[HostCounts]:
    """Counts of this process's threads inside the block; filled in at its end."""
    before = HostCounts.now()
    counts = HostCounts()
    try:
        yield counts
    finally:
        vars(counts).update(vars(HostCounts.now() - before))


@dataclass(frozen=True)
class ProcessCounts:
    """Counts of a process with VNPU_COUNTS, and its command line in one line."""

    process: int
    command: str
    counts: HostCounts


def read(directory: Path) -> list[ProcessCounts]:
    """Counts of all processes with VNPU_COUNTS=`directory`, also of running ones."""
    found = []
    for path in sorted(directory.glob(f"*{_SUFFIX}"), key=lambda path: int(path.stem)):
        content = path.read_bytes()
        if len(content) < _NUMBERS.size:
            continue  # a process that has just started
        command = " ".join(content[_NUMBERS.size :].decode(errors="replace").split())
        counts = HostCounts(*_NUMBERS.unpack_from(content))
        found.append(ProcessCounts(int(path.stem), command, counts))
    return found


def report(directory: Path) -> None:
    """Prints a line per process and a total to stderr."""
    found = read(directory)
    if not found:
        print("vnpu: no process launched work or waited for a device.", file=sys.stderr)
        return
    columns = ("launches", "synchronizations", "copies_to_host")
    rows = [
        (f"{each.process}", *(getattr(each.counts, name) for name in columns), _shown(each.command))
        for each in found
    ]
    if len(found) > 1:
        rows.append(("all", *(sum(row[i] for row in rows) for i in (1, 2, 3)), ""))
    print(
        f"vnpu: {'process':>8} {'launches':>12} {'waits':>10} {'copies to host':>15}",
        file=sys.stderr,
    )
    for process, launches, waits, copies, shown in rows:
        line = f"vnpu: {process:>8} {launches:>12,} {waits:>10,} {copies:>15,}  {shown}"
        print(line.rstrip(), file=sys.stderr)


def _shown(command: str) -> str:
    """Shortens a command line for the report: the program without its directory, cut to fit."""
    program, _, arguments = command.partition(" ")
    line = f"{Path(program).name} {arguments}"
    return line if len(line) <= _LONGEST_NAME else f"{line[: _LONGEST_NAME - 3]}..."
