"""Tables of the outcomes of injected faults."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

COLUMNS = (
    "points", "tried", "bit-equal", "error with its cause", "not reached", "anything else",
    "fault to end, median", "worst",
)  # fmt: skip
GOOD = ("bit-equal", "error with its cause", "not reached")


@dataclass
class Tally:
    """Counts of outcomes for one kind of points."""

    points: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    times_s: list[float] = field(default_factory=list)

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.points + other.points, self.outcomes + other.outcomes, self.times_s + other.times_s
        )

    def cells(self) -> str:
        """Formats the tally's columns of a table."""
        good = [str(self.outcomes[name]) for name in GOOD]
        bad = ", ".join(f"{n} {name}" for name, n in self.outcomes.items() if name not in GOOD)
        times = (
            f"{statistics.median(self.times_s):.1f} s | {max(self.times_s):.1f} s"
            if self.times_s
            else "|"
        )
        tried = self.outcomes.total()
        return f"{self.points} | {tried} | {' | '.join(good)} | {bad or 'none'} | {times} |"


def page(tallies: dict[tuple[str, str], Tally], one_in: int, stamp: str) -> str:
    """Returns the page in Markdown. stamp: date and commit of the figures"""
    lines = [
        "# Faults at the points of an engine",
        "",
        stamp,
        "",
        f"Written by `nox -s faults -- --one-in {one_in} --page FILE`. Counted on virtual",
        "NPUs; times are of one machine with two cores, which had other work.",
        "",
        "A small engine starts, answers three requests and ends; each time",
        "another point fails. Polls depend on time: a run may end before it comes to a point.",
        "",
        *table({(kind,): tally for kind, tally in by_kind(tallies).items()}, "kind"),
        "",
        *table(tallies, "engine", "kind"),
    ]
    return "\n".join(lines) + "\n"


def by_kind(tallies: dict[tuple[str, str], Tally]) -> dict[str, Tally]:
    """Sums the tallies of all engines by kind."""
    sums: dict[str, Tally] = {}
    for (_, kind), tally in sorted(tallies.items(), key=lambda each: each[0][1]):
        sums[kind] = sums.get(kind, Tally()) + tally
    return sums


def table(tallies: Mapping[tuple[str, ...], Tally], *names: str) -> list[str]:
    """Returns a Markdown table with a line per tally. names: titles of the keys' columns"""
    rules = ["---"] * len(names) + ["--:"] * 5 + ["---"] + ["--:"] * 2
    return [
        f"| {' | '.join((*names, *COLUMNS))} |",
        f"| {' | '.join(rules)} |",
        *(f"| {' | '.join(key)} | {tally.cells()}" for key, tally in tallies.items()),
    ]
