"""Reads the operator library's rows: declarations and constraints."""

import ctypes
import json
from dataclasses import dataclass
from typing import Any

from vllm_davinci.vnpu.activate import library_directory


@dataclass(frozen=True)
class Declared:
    """Declaration of an operator.

    operator:  name with "aclnn"
    tier:      "T1", "T2", "T3" or "-"
    priced:    True if it has a cost, without which it cannot be launched under `--chip`
    arguments: as in the row
    """

    operator: str
    tier: str
    priced: bool
    arguments: str


@dataclass(frozen=True)
class Constraint:
    """A rule for an operator's calls.

    rule:         completes "the argument must"
    form:         kind and values of a rule of a common kind: ["dtype", ["float16", "bfloat16"]]
    chips:        "A2, A3, 310P" or fewer
    since, until: releases of CANN, "8.5", inclusive
    status:       status that a violating call returns
    limit:        True for limits on dtypes, sizes and amounts, which SoC `reference` lacks
    """

    operator: str
    argument: str
    rule: str
    form: list[Any] | None
    source: str
    chips: str
    since: str
    until: str
    status: int
    limit: bool


def _listed(function: str) -> list[dict[str, Any]]:
    """Loads the operator library, with libtorch_cpu."""
    library = ctypes.CDLL(str(library_directory() / "libopapi.so"))
    listed = library[function]
    listed.restype = ctypes.c_char_p
    text: bytes = listed()
    return [json.loads(line) for line in text.decode().splitlines()]


def declared() -> list[Declared]:
    """All operators of the library, by name."""
    rows = [Declared(**row) for row in _listed("vnpuListOperators")]
    return sorted(rows, key=lambda row: row.operator)


def constraints() -> list[Constraint]:
    """All rules, of every chip and release, by operator and in the order of checking."""
    rows = [Constraint(**row) for row in _listed("vnpuListConstraints")]
    return sorted(rows, key=lambda row: row.operator)
