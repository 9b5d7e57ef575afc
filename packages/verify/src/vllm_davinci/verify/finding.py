"""Findings of a part, as the report keeps them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """How two findings of one name are compared.

    EXACT:  they are equal or they differ
    FIGURE: a time, a rate or a size that was measured; they differ by more than a tolerance
    ERROR:  how far a result lies from its reference; they differ where one keeps its bound and the
            other does not, or both do not
    NOTE:   says something about the run and is not compared
    """

    EXACT = "exact"
    FIGURE = "figure"
    ERROR = "error"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """
    name:    tells it from all others of a report: "operators/npu_swiglu/qwen3-8b/bfloat16"
    unit:    of a figure; "" for others
    bound:   up to which an error is that of rounding
    passed:  whether it is what we believe; None where we believe nothing
    details: what mends the virtual NPU or finds the mistake: arguments, seed, the device's message
    """

    name: str
    value: Any
    kind: Kind = Kind.EXACT
    unit: str = ""
    bound: float | None = None
    passed: bool | None = None
    details: dict[str, Any] = field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        """As JSON, without what is not said."""
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
