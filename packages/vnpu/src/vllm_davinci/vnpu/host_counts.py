"""How often hosts launched work, waited for a device and copied from it."""

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
    """Since a process began, or of one piece of work.

    launches:         tasks given to streams; a graph's replay is one, events are none
    synchronizations: of streams, events and devices, also those with nothing to wait for
    copies_to_host:   from a device's memory, asynchronous ones too
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
    """Counts of this process inside the block, all threads; filled in when it is left."""
    before = HostCounts.now()
    counts = HostCounts()
    try:
        yield counts
    finally:
        vars(counts).update(vars(HostCounts.now() - before))


@dataclass(frozen=True)
class ProcessCounts:
    """Counts of one process that named a directory in VNPU_COUNTS; its command line is one line."""

    process: int
    command: str
    counts: HostCounts


def read(directory: Path) -> list[ProcessCounts]:
    """Counts of all processes that named `directory` in VNPU_COUNTS, those that still run too."""
    found = []
    for path in sorted(directory.glob(f"*{_SUFFIX}"), key=lambda path: int(path.stem)):
        content = path.read_bytes()
        if len(content) < _NUMBERS.size:
            continue  # a process that has just begun
        command = " ".join(content[_NUMBERS.size :].decode(errors="replace").split())
        counts = HostCounts(*_NUMBERS.unpack_from(content))
        found.append(ProcessCounts(int(path.stem), command, counts))
    return found


def report(directory: Path) -> None:
    """Prints a line for each process and one for all of them, to stderr."""
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
    """A command line as the report shows it: the program without its directory, cut to fit."""
    program, _, arguments = command.partition(" ")
    line = f"{Path(program).name} {arguments}"
    return line if len(line) <= _LONGEST_NAME else f"{line[: _LONGEST_NAME - 3]}..."
