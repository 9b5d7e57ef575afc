"""Table of published figures by the timing model's mechanisms, in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Steps and rates must be within this share of the published value; ratios within this one.
_ABSOLUTE, _SMALL_RATIO, _LARGE_RATIO, _SMALL = 0.20, 0.05, 0.10, 1.15
_WITHOUT = "without "


@dataclass(frozen=True)
class Compared:
    """A published figure and ours.

    errors: of ours with the whole model ("") and without each mechanism, as a share
    """

    name: str
    unit: str
    published: float
    ours: float
    errors: Mapping[str, float]
    is_ratio: bool

    @staticmethod
    def of(
        name: str, unit: str, published: float, values: Mapping[str, float], is_ratio: bool
    ) -> Compared:
        """values: ours by machine; "" is the whole model"""
        errors = {machine: value / published - 1 for machine, value in values.items()}
        return Compared(name, unit, published, values[""], errors, is_ratio)

    @property
    def is_within(self) -> bool:
        """True if the error is within its limit."""
        if not self.is_ratio:
            return abs(self.errors[""]) <= _ABSOLUTE
        limit = _SMALL_RATIO if self.published < _SMALL else _LARGE_RATIO
        return abs(self.ours - self.published) <= limit

    @property
    def sign(self) -> str:
        """True if our ratio and the published one lie on the same side of 1."""
        if not self.is_ratio:
            return ""
        return "right" if (self.ours > 1) == (self.published > 1) else "**wrong**"

    @property
    def helpful(self) -> list[str]:
        """Mechanisms whose removal reduces the error by more than 0.01."""
        whole = abs(self.errors[""])
        return [
            name.removeprefix(_WITHOUT)
            for name, error in self.errors.items()
            if name and abs(error) < whole - 0.01
        ]


def page_of(compared: Sequence[Compared], machine: str) -> str:
    """The table. machine: title of the machine in the first row"""
    names = list(dict.fromkeys(name for each in compared for name in each.errors if name))
    head = ["figure", "published", "ours", "error", *names, "within", "sign"]
    lines = [
        f"Modelled by `{machine}`; errors of the whole model, then without one mechanism each.",
        "",
        f"| {' | '.join(head)} |",
        f"|{' --- |' * len(head)}",
    ]
    for each in compared:
        errors = [each.errors.get(name) for name in ("", *names)]
        told = ["" if error is None else f"{error:+.1%}" for error in errors]
        cells = [
            each.name,
            f"{each.published:g} {each.unit}",
            f"{each.ours:.3g}",
            *told,
            "yes" if each.is_within else "**no**",
            each.sign,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    inside = sum(each.is_within for each in compared)
    signs = [each for each in compared if each.sign]
    right = sum(each.sign == "right" for each in signs)
    told = f"{inside} of {len(compared)} are within limits; of {len(signs)} ratios {right} have"
    lines += ["", f"{told} the right sign."]
    return "\n".join(lines) + "\n"
