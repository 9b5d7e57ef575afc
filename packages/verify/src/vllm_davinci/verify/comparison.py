"""`vllm-davinci verify --compare A B`: the differences of two reports, by name."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from vllm_davinci.verify.finding import Kind
from vllm_davinci.verify.report import Report, findings_of

TOLERANCE = 0.1
"""Relative difference up to which two figures count as equal."""
ABSENT = "absent"


@dataclass(frozen=True)
class Difference:
    """
    one, other: values, or ABSENT
    why:        description of the difference
    """

    name: str
    kind: str
    one: Any
    other: Any
    why: str

    def fields(self) -> dict[str, Any]:
        return asdict(self)


def differences(one: Report, other: Report, tolerance: float = TOLERANCE) -> list[Difference]:
    """The differences in the reports' order. A part that one report lacks is one difference."""
    ran = [{part["name"] for part in report["parts"]} for report in (one, other)]
    found = [_only_in(name, name in ran[0]) for name in sorted(ran[0] ^ ran[1])]
    both = ran[0] & ran[1]
    a, b = findings_of(one), findings_of(other)
    for name in {**a, **b}:
        if name.split("/")[0] in both:
            found += _of_one(name, a.get(name), b.get(name), tolerance)
    return found


def _only_in(part: str, is_in_one: bool) -> Difference:
    values = ("ran", ABSENT) if is_in_one else (ABSENT, "ran")
    return Difference(part, Kind.EXACT, values[0], values[1], "the part ran in one report only")


def _of_one(
    name: str, a: dict[str, Any] | None, b: dict[str, Any] | None, tolerance: float
) -> Iterator[Difference]:
    kind = (a or b or {})["kind"]
    if kind == Kind.NOTE:
        return
    if a is None or b is None:
        only = a or b or {}
        values = (only["value"], ABSENT) if a else (ABSENT, only["value"])
        yield Difference(name, kind, values[0], values[1], "one report has it")
        return
    why = _why(kind, a, b, tolerance)
    if why:
        yield Difference(name, kind, a["value"], b["value"], why)


def _why(kind: str, a: dict[str, Any], b: dict[str, Any], tolerance: float) -> str:
    one, other = a["value"], b["value"]
    if kind == Kind.FIGURE and all(isinstance(each, (int, float)) for each in (one, other)):
        if one == other:
            return ""
        ratio = other / one if one else float("inf")
        return "" if 1 / (1 + tolerance) <= ratio <= 1 + tolerance else f"{ratio:.3g} times"
    if kind == Kind.ERROR:
        return _of_errors(a, b)
    if one == other:
        return ""
    if isinstance(one, list) and isinstance(other, list):
        return f"from entry {_first_difference(one, other)} on"
    return "other value"


def _of_errors(a: dict[str, Any], b: dict[str, Any]) -> str:
    """Describes errors beyond their bounds; smaller ones are rounding."""
    passed = [each.get("passed") for each in (a, b)]
    if all(passed):
        return ""
    if passed[0] != passed[1]:
        return f"only the {'first' if passed[0] else 'second'} keeps the bound {_bound(a, b)}"
    messages = [each.get("details", {}).get("message") for each in (a, b)]
    return "" if a["value"] == b["value"] and messages[0] == messages[1] else "both are wrong"


def _bound(a: dict[str, Any], b: dict[str, Any]) -> str:
    return str(a.get("bound", b.get("bound", "")))


def _first_difference(one: list[Any], other: list[Any]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
