"""Reads the files of `chips/`, the only place that states a chip's figures.

This module needs the standard library only: the build of libvnpu reads the same files through it
(`cmake/generate_chips.py`), before anything of this package is built.
"""

import decimal
import pathlib
import tomllib
from typing import Any

FOLDER = pathlib.Path(__file__).parent / "chips"

UNITS: dict[str, tuple[str, int]] = {
    "GOP/s": ("rate of operations", 10**9),
    "TOP/s": ("rate of operations", 10**12),
    "GB/s": ("bandwidth", 10**9),
    "TB/s": ("bandwidth", 10**12),
    "ns": ("time", 10**3),
    "us": ("time", 10**6),
    "ms": ("time", 10**9),
    "MiB": ("size", 1 << 20),
    "GiB": ("size", 1 << 30),
    "share": ("share", 10**6),
    "cores": ("number", 1),
    "devices": ("number", 1),
    "events": ("number", 1),
    "queues": ("number", 1),
    "ranks": ("number", 1),
    "streams": ("number", 1),
    "tasks": ("number", 1),
}
"""Unit -> its dimension, and its size in base units."""

_MERGED = ("figures", "limits")
_ANY_CHIP = "Ascend"  # `soc_prefix` of the file for all other chips


def read_table(path: pathlib.Path) -> dict[str, Any]:
    """Reads a TOML file, with exact decimals. Raises OSError or ValueError."""
    return tomllib.loads(path.read_text(encoding="utf-8"), parse_float=decimal.Decimal)


def read_chip(path: pathlib.Path, folder: pathlib.Path = FOLDER) -> dict[str, Any]:
    """Reads a chip's table, completed from the chip of `folder` that it is `based_on`.

    That chip may be based on another one. Raises OSError or ValueError for a file that cannot be
    read.
    """
    table = read_table(path)
    base = table.get("based_on")
    if base is None:
        return table
    below = read_chip(folder / f"{base}.toml", folder)
    merged = {key: {**below.get(key, {}), **table.get(key, {})} for key in _MERGED}
    return {**below, **table, **merged}


def chip_and_soc(spoken: str, folder: pathlib.Path = FOLDER) -> tuple[str, str] | None:
    """The name of a chip's file, and its SoC as a runtime reports it; None if the chip is unknown.

    spoken: either name, in any case: "ascend910b3", "Ascend910B3", "Ascend910_9382"
    """
    asked = spoken.lower()
    for path in sorted(folder.glob("*.toml")):
        table = read_chip(path, folder)
        soc = table["soc"]
        if asked in (path.stem, soc.lower()):
            return path.stem, soc
        # A chip's SoC names differ in the number after their prefix.
        prefix = table.get("soc_prefix", soc)
        number = asked.removeprefix(prefix.lower())
        if prefix not in (soc, _ANY_CHIP) and number != asked and number.isdecimal():
            return path.stem, f"{prefix}{number}"
    return None


def amount(entry: dict[str, Any]) -> int:
    """Converts a figure `{ value, unit, source }` to its base unit."""
    return int(entry["value"] * UNITS[entry["unit"]][1])
