"""Times of test files: measured in every run, and recorded to order the lanes' files."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from vllm_davinci_testing.processes import fork_server

RESULTS = "results/test_times.json"  # written by every run, below the root
RECORDED = "tests/times.json"  # copy in the repository, written with `--record-times`
# Assumed time of a file without a row; files that take more than a second have rows.
LEAST_S = 1.0
UNKNOWN_END_TO_END_S = 20.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Seconds:
    """wall: wall time. processor: processor time of all ended processes that the tests started"""

    wall: float
    processor: float


class Clock:
    """Measures times from one reading to the next."""

    def __init__(self) -> None:
        self._wall, self._processor = monotonic(), _processor_seconds()

    def read(self) -> Seconds:
        wall, processor = monotonic(), _processor_seconds()
        taken = Seconds(wall - self._wall, processor - self._processor)
        self._wall, self._processor = wall, processor
        return taken


def _processor_seconds() -> float:
    """Sums processor times of this process, its fork server, and their ended children."""
    own = os.times()
    seconds = own.user + own.system + own.children_user + own.children_system
    if server := fork_server.process_id():
        try:
            fields = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()
        except FileNotFoundError:
            return seconds
        seconds += sum(map(int, fields[11:15])) / _TICKS_PER_S
    return seconds


@dataclass
class FileTimes:
    """The time of one file's tests, including collection."""

    cases: int = 0
    wall_s: float = 0.0
    processor_s: float = 0.0


@dataclass
class Times:
    """Times of a run. files: by path below the root; cases: processor seconds by test"""

    files: dict[str, FileTimes] = field(default_factory=dict)
    cases: dict[str, float] = field(default_factory=dict)

    def collected(self, file: str, taken: Seconds) -> None:
        self._add(file, taken, cases=0)

    def ran(self, node_id: str, taken: Seconds) -> None:
        self._add(node_id.split("::")[0], taken, cases=1)
        self.cases[node_id] = round(taken.processor, 2)

    def _add(self, file: str, taken: Seconds, cases: int) -> None:
        times = self.files.setdefault(file, FileTimes())
        times.cases += cases
        times.wall_s += taken.wall
        times.processor_s += taken.processor

    def longest(self, count: int) -> list[tuple[str, FileTimes]]:
        return sorted(self.files.items(), key=lambda item: -item[1].processor_s)[:count]

    def by_group(self, group_of: Callable[[str], str]) -> list[tuple[str, FileTimes]]:
        """Returns sums by group, the largest first. group_of: maps a file to its group"""
        sums: dict[str, FileTimes] = {}
        for file, times in self.files.items():
            total = sums.setdefault(group_of(file), FileTimes())
            total.cases += times.cases
            total.wall_s += times.wall_s
            total.processor_s += times.processor_s
        return sorted(sums.items(), key=lambda item: -item[1].processor_s)

    def write(self, root: Path, selection: str) -> None:
        """Writes RESULTS. selection: the cases that ran"""
        files = {
            file: {
                key: round(value, 2) if isinstance(value, float) else value
                for key, value in asdict(times).items()
            }
            for file, times in sorted(self.files.items())
        }
        slow = {case: seconds for case, seconds in self.cases.items() if seconds > LEAST_S}
        _write(
            root / RESULTS,
            {"processor": processor(), "selection": selection, "files": files, "cases": slow},
        )

    def record(self, root: Path, selection: str) -> None:
        """Puts this run into RECORDED under its selection; removes files that no longer exist."""
        recorded = _read(root / RECORDED)
        rows = dict(recorded.get(selection, {}))
        rows.update({file: round(times.processor_s, 1) for file, times in self.files.items()})
        recorded |= {
            "processor": processor(),
            selection: {
                file: seconds
                for file, seconds in sorted(rows.items())
                if seconds > LEAST_S and (root / file).is_file()
            },
        }
        _write(root / RECORDED, recorded)


def expected_seconds(config: pytest.Config) -> Callable[[str], float]:
    """Returns a function that estimates a file's processor time from recorded runs."""
    recorded = _read(config.rootpath / RECORDED)
    rows = {**recorded.get("daily", {})}
    if config.getoption("all"):
        rows |= recorded.get("all", {})

    def seconds(file: str) -> float:
        unknown = UNKNOWN_END_TO_END_S if file.startswith("tests/e2e/") else LEAST_S
        return float(rows.get(file, unknown))

    return seconds


def processor() -> str:
    """Returns this machine's processor, with the number of cores that tests may use."""
    name = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
            break
    return f"{len(os.sched_getaffinity(0))} cores of {name}"


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
