"""Tables of published figures, our goals, and errors by mechanism, in Markdown."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from vllm_davinci.vnpu.timing.variants import WITHOUT

# Largest relative error of steps and rates; of ratios below _SMALL; of other ratios; _SMALL.
_ABSOLUTE, _SMALL_RATIO, _LARGE_RATIO, _SMALL = 0.20, 0.05, 0.10, 1.15


@dataclass(frozen=True)
class Compared:
    """A published figure or a goal, with our value.

    published: None if there is only a goal
    values:    ours by machine; "" is the stated machine
    interval:  of ours, over the ranges of assumed figures and of what the source leaves open
    is_ratio:  True if it must lie on the published side of 1
    goal:      minimum over the whole interval; negative: minus the maximum; None: no goal
    taken:     assumptions for what the source does not state
    """

    name: str
    unit: str
    published: float | None
    values: Mapping[str, float]
    interval: tuple[float, float]
    is_ratio: bool = False
    goal: float | None = None
    taken: str = ""

    @property
    def ours(self) -> float:
        """Returns the value on the stated machine."""
        return self.values[""]

    @property
    def errors(self) -> dict[str, float]:
        """Returns relative errors: of the whole model (""), and without each mechanism."""
        assert self.published is not None
        return {
            name.removeprefix(f"{WITHOUT} "): value / self.published - 1
            for name, value in self.values.items()
            if not name or name.startswith(f"{WITHOUT} ")
        }

    @property
    def is_within(self) -> bool:
        """True if the error is within its limit, or the interval contains the published figure."""
        assert self.published is not None
        lowest, highest = self.interval
        if lowest <= self.published <= highest:
            return True
        if not self.is_ratio:
            return abs(self.errors[""]) <= _ABSOLUTE
        limit = _SMALL_RATIO if self.published < _SMALL else _LARGE_RATIO
        return abs(self.ours - self.published) <= limit

    @property
    def sign(self) -> str:
        """Tells whether our whole interval lies on the published ratio's side of 1."""
        if not self.is_ratio or self.published is None:
            return ""
        ends = {(end > 1) == (self.published > 1) for end in self.interval}
        return "right" if ends == {True} else "**wrong**" if ends == {False} else "**both**"

    @property
    def at_least(self) -> float | None:
        """Returns the goal if it is a minimum."""
        return self.goal if self.goal is not None and self.goal > 0 else None

    @property
    def at_most(self) -> float | None:
        """Returns the goal if it is a maximum."""
        return -self.goal if self.goal is not None and self.goal < 0 else None

    @property
    def meets_goal(self) -> bool:
        """True if the whole interval meets the goal."""
        lowest, highest = self.interval
        return lowest >= (self.at_least or lowest) and highest <= (self.at_most or highest)


def page_of(compared: Sequence[Compared], machine: str) -> str:
    """Writes the tables. machine: the machine's title, for the first row"""
    published = [each for each in compared if each.published is not None]
    goals = [each for each in compared if each.goal is not None]
    inside = sum(each.is_within for each in published)
    signs = [each.sign for each in published if each.sign]
    told = (
        f"{inside} of {len(published)} are within limits; of {len(signs)} ratios "
        f"{signs.count('right')} have the right sign over the whole interval."
    )
    parts = [
        f"Modelled by `{machine}`.",
        _table(("figure", "published", "ours", "interval", "error", "within", "sign", "taken"),
               map(_cells, published)),
        told,
        "## Goals of our own schedules",
        _table(("figure", "goal", "ours", "interval", "over the whole interval"),
               map(_goal_cells, goals)),
        "## Errors without each mechanism",
        "Errors of the whole model, then without one mechanism each.",
        _errors(published),
    ]  # fmt: skip
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _cells(each: Compared) -> tuple[str, ...]:
    return (
        each.name,
        f"{each.published:.4g} {each.unit}",
        f"{each.ours:.3g}",
        _interval(each),
        f"{each.errors['']:+.1%}",
        "yes" if each.is_within else "**no**",
        each.sign,
        each.taken,
    )


def _goal_cells(each: Compared) -> tuple[str, ...]:
    told = f"at most {each.at_most:.3g}" if each.at_most else f"at least {each.at_least:.3g}"
    met = "met" if each.meets_goal else "**missed**"
    return each.name, f"{told} {each.unit}", f"{each.ours:.4g}", _interval(each), met


def _interval(each: Compared) -> str:
    lowest, highest = each.interval
    return f"{lowest:.3g} to {highest:.3g}"


def _errors(published: Sequence[Compared]) -> str:
    names = list(dict.fromkeys(name for each in published for name in each.errors if name))
    head = ("figure", "error", *(f"{WITHOUT} {name}" for name in names))
    return _table(
        head,
        (
            (
                each.name,
                *("" if (error := each.errors.get(name)) is None else f"{error:+.1%}"
                  for name in ("", *names)),
            )
            for each in published
        ),
    )  # fmt: skip


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
