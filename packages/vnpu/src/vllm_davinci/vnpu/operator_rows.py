"""The rows of the operator library: what each operator declares, and what its documents allow."""

import ctypes
import json
from dataclasses import dataclass
from typing import Any

from vllm_davinci.vnpu.activate import library_directory


@dataclass(frozen=True)
class Declared:
    """An operator as its row declares it.

    operator:  name with "aclnn"
    tier:      "T1", "T2", "T3" or "-"
    priced:    the timing model knows its cost; without one it cannot be launched under `--chip`
    arguments: as the row spells them
    """

    operator: str
    tier: str
    priced: bool
    arguments: str


@dataclass(frozen=True)
class Constraint:
    """A rule that calls of an operator have to keep.

    rule:         completes "the argument must"
    form:         kind of the rule and what it compares with, where it is one of the common kinds:
                  ["dtype", ["float16", "bfloat16"]]
    chips:        "A2, A3, 310P" or fewer
    since, until: releases of CANN, "8.5", inclusive
    status:       what a call outside the rule returns
    limit:        of dtypes, sizes and amounts, which SoC `reference` does not have
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
    """Loads the operator library, and libtorch_cpu with it."""
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
    """All rules, of every chip and release, by operator and in the order in which they are held."""
    rows = [Constraint(**row) for row in _listed("vnpuListConstraints")]
    return sorted(rows, key=lambda row: row.operator)
