"""Checks the figures of a machine's files and converts them to base units."""

import dataclasses
import decimal
from collections.abc import Mapping
from typing import Any

from vllm_davinci.vnpu.errors import MachineError
from vllm_davinci.vnpu.timing.chip_files import UNITS


@dataclasses.dataclass(frozen=True)
class Assumption:
    """A figure that no source states.

    bounds: its range; "" if it does not affect times
    """

    figure: str
    value: str
    why: str
    bounds: str = ""


class FigureReader:
    """Reads figures; collects the assumed ones and all ranges."""

    def __init__(self) -> None:
        self.assumptions: list[Assumption] = []
        self.ranges: dict[str, tuple[int, int]] = {}

    def __call__(
        self,
        where: str,
        name: str,
        stated: Mapping[str, Any],
        dimension: str,
        prefix: str = "",
        *,
        has_range: bool = False,
    ) -> int:
        """The figure in its base unit.

        prefix:    prefix of its name among the machine's figures
        has_range: True if an assumed figure must state its range
        """
        units = [unit for unit, (of, _) in UNITS.items() if of == dimension]
        shape = f'{name} = {{ value = ..., unit = "{units[0]}", source = "..." }}'
        entry = stated.get(name)
        if entry is None:
            raise MachineError(f"{where} lacks the figure {name} ({dimension}). State {shape}.")
        if not isinstance(entry, dict) or not {"value", "unit", "source"} <= entry.keys():
            raise MachineError(f"{where}: {name} = {entry!r}. Expected {shape}.")
        unit, source = entry["unit"], str(entry["source"])
        if unit not in units:
            raise MachineError(
                f"{where}: {name} is in {unit!r}, but a {dimension} is needed: {', '.join(units)}."
            )
        if not source:
            raise MachineError(
                f'{where}: {name} has no source. State where it was read, or "assumed: ...".'
            )
        value = _amount(f"{where}: {name}", entry["value"], unit, dimension)
        is_assumed = source.startswith("assumed")
        bounds = ""
        if has_range and ("low" in entry or "high" in entry or is_assumed):
            self.ranges[prefix + name] = _range(where, name, entry, dimension, value)
            bounds = f"{entry['low']} to {entry['high']} {unit}"
        if is_assumed:
            figure = Assumption(f"{where}: {name}", f"{entry['value']} {unit}", source, bounds)
            self.assumptions.append(figure)
        return value


def _range(
    where: str, name: str, entry: Mapping[str, Any], dimension: str, value: int
) -> tuple[int, int]:
    missing = [bound for bound in ("low", "high") if bound not in entry]
    if missing:
        raise MachineError(
            f"{where}: {name} = {entry['value']} {entry['unit']} is assumed without "
            f"{' and '.join(missing)}. State its range, as in low = {entry['value']}, high = "
            f"{entry['value']}."
        )
    low, high = (
        _amount(f"{where}: {bound} of {name}", entry[bound], entry["unit"], dimension)
        for bound in ("low", "high")
    )
    if not low <= value <= high:
        raise MachineError(
            f"{where}: {name} = {entry['value']} {entry['unit']} is outside its range, low "
            f"{entry['low']} to high {entry['high']}. Correct one of the three."
        )
    return low, high


def _amount(what: str, value: object, unit: str, dimension: str) -> int:
    """The value in its base unit."""
    if isinstance(value, bool) or not isinstance(value, (int, decimal.Decimal)) or value < 0:
        raise MachineError(f"{what} has the value {value!r}. Expected a number from 0 on.")
    exact = value * UNITS[unit][1]
    if exact != int(exact):
        raise MachineError(f"{what} = {value} {unit} has more digits than the model keeps.")
    if dimension == "share" and not 0 < exact <= 10**6:
        raise MachineError(f"{what} = {value} is not a share: expected above 0, up to 1.")
    return int(exact)
