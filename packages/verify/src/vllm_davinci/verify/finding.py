"""Findings of a part, as in the report."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """Comparison of two findings of one name.

    EXACT:  equal or different
    FIGURE: a measured time, rate or size; different beyond a tolerance
    ERROR:  distance of a result from its reference; different unless both are within the bound
    NOTE:   about the run; not compared
    """

    EXACT = "exact"
    FIGURE = "figure"
    ERROR = "error"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """
    name:    unique in a report: "operators/npu_swiglu/qwen3-8b/bfloat16"
    unit:    unit of a figure; "" for others
    bound:   maximum error that rounding explains
    passed:  True if as expected; None if there is no expectation
    details: what helps to find the mistake or correct the virtual NPU: arguments, seed, message
    """

    name: str
    value: Any
    kind: Kind = Kind.EXACT
    unit: str = ""
    bound: float | None = None
    passed: bool | None = None
    details: dict[str, Any] = field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        """The finding as JSON, without unset fields."""
        said = {
            "name": self.name,
            "value": self.value,
            "kind": self.kind.value,
            "unit": self.unit or None,
            "bound": self.bound,
            "passed": self.passed,
            "details": self.details or None,
        }
        return {name: each for name, each in said.items() if each is not None or name == "value"}
