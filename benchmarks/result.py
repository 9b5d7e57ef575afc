"""A benchmark's result: two sides of a comparison, and the source of each figure.

from result import Result, Row

def add_arguments(parser): ...
def run(args) -> Result: ...
"""

import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Self

# Version of the result format; readers refuse others.
FORMAT = 1
# Processor flags, as in /proc/cpuinfo, that decide which matrix product a library chooses.
MATRIX_INSTRUCTIONS = ("avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")
DISTRIBUTIONS = (
    "torch",
    "torch_npu",
    "vllm",
    "transformers",
    "vllm-davinci",
    "vllm-davinci-core",
    "vllm-davinci-kernels",
    "vllm-davinci-models",
    "vllm-davinci-multistream",
    "vllm-davinci-operators",
    "vllm-davinci-vnpu",
)


class Kind(StrEnum):
    """Source of a figure. Figures of different kinds are never compared."""

    MEASURED = "measured"  # this host's clock, or its memory
    MODELLED = "modelled"  # the virtual NPU's timing model
    COUNTED = "counted"  # exact counts: launches, copies, bytes, tokens


@dataclass(frozen=True)
class Row:
    """One figure for both sides.

    ours, baseline: the two sides in `unit`, from the same run; baseline is None if there is none
    bound: the best value possible in this run, in `unit`; None if there is none
    at_least, at_most: the goal for `ratio`, or for `ours` without a baseline
    quartiles: of ours, if it is a median
    interval: range of `ratio`, or of `ours` without a baseline, over all assumptions; all of it
        must reach the goal
    """

    name: str
    unit: str
    ours: float
    kind: Kind
    baseline: float | None = None
    bound: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    quartiles: tuple[float, float] | None = None
    interval: tuple[float, float] | None = None
    note: str = ""

    @classmethod
    def median(
        cls,
        name: str,
        unit: str,
        ours: Sequence[float],
        baseline: Sequence[float] = (),
        scale: float = 1.0,
        **more: Any,
    ) -> Self:
        """The medians of both sides' measured values. scale: factor from these to `unit`"""
        low, middle, high = statistics.quantiles(ours, n=4) if len(ours) > 1 else [*ours] * 3
        more.setdefault("quartiles", (low * scale, high * scale))
        if baseline:
            more["baseline"] = statistics.median(baseline) * scale
        return cls(name, unit, middle * scale, Kind.MEASURED, **more)

    @property
    def ratio(self) -> float | None:
        """ours / baseline."""
        return None if not self.baseline else self.ours / self.baseline

    @property
    def is_met(self) -> bool | None:
        """True if the goal is reached; None without a goal."""
        if self.at_least is None and self.at_most is None:
            return None
        value = self.ours if self.ratio is None else self.ratio
        lowest, highest = self.interval or (value, value)
        return (self.at_least is None or lowest >= self.at_least) and (
            self.at_most is None or highest <= self.at_most
        )


@dataclass(frozen=True)
class Result:
    """One run of one benchmark.

    ours, baseline: descriptions of the two sides, for the table's head
    device: the device under test and, on the virtual NPU, its execution policy
    settings: settings that affect the figures; run.py adds the benchmark's options, and their seed
    benchmark: GROUP/NAME, from run.py
    """

    ours: str
    baseline: str
    rows: list[Row]
    device: str = field(
        default_factory=lambda: f"vnpu, policy {os.environ.get('VNPU_SCHEDULE', 'eager')}"
    )
    settings: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    bounded_by: str = ""
    benchmark: str = ""
    versions: dict[str, str] = field(default_factory=lambda: installed_versions())
    host: dict[str, Any] = field(default_factory=lambda: host_facts())
    finished_at: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%S%z"))

    def to_json(self) -> dict[str, Any]:
        rows = [
            {**asdict(row), "ratio": row.ratio, "is_met": row.is_met, "kind": row.kind.value}
            for row in self.rows
        ]
        return {"format": FORMAT, **asdict(self), "rows": rows}


def installed_versions() -> dict[str, str]:
    """Returns the versions of all involved packages, from installed metadata."""
    found = {"python": platform.python_version()}
    for distribution in DISTRIBUTIONS:
        try:
            found[distribution] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def host_facts() -> dict[str, Any]:
    """Returns the processor, cores and threads, which affect measured figures."""
    model = platform.machine()
    flags: set[str] = set()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() == "model name":
                    model = value.strip()
                elif name.strip() == "flags":
                    flags = set(value.split())
    except OSError:
        pass
    return {
        "processor": model,
        "matrix_instructions": sorted(flags.intersection(MATRIX_INSTRUCTIONS)),
        "cores": len(os.sched_getaffinity(0)),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", ""),
    }
