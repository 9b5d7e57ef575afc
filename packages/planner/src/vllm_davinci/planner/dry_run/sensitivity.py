"""Sensitivity of step times to assumed figures: intervals, and the figures that move them most."""

import dataclasses
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from vllm_davinci.planner.dry_run.step import Step, median_step
from vllm_davinci.vnpu.timing import Machine
from vllm_davinci.vnpu.timing.variants import DRAWN, HIGH, LOW, WITHOUT

_MS = 10**9  # picoseconds
_SHOWN = 8  # number of figures shown per kind of step


@dataclasses.dataclass(frozen=True)
class Move:
    """Step time with one figure at its low and at its high end, in picoseconds."""

    figure: str
    low: int
    high: int

    @property
    def width(self) -> int:
        return abs(self.high - self.low)


def _is_without(name: str) -> bool:
    """True for a variant that omits one of the model's mechanisms."""
    return name.startswith(f"{WITHOUT} ")


def moves_of(step: Step) -> list[Move]:
    """The effect of each figure with a range, the largest first."""
    figures = dict.fromkeys(
        name.rpartition(" ")[0]
        for name in step.variants
        if not (name.startswith(f"{DRAWN} ") or _is_without(name))
    )

    def with_figure(figure: str, end: str) -> int:
        # A figure at an end of its range has no variant there.
        return step.variants.get(f"{figure} {end}", step.modelled).host_ps

    moves = [
        Move(figure, with_figure(figure, LOW), with_figure(figure, HIGH)) for figure in figures
    ]
    return sorted(moves, key=lambda move: (-move.width, move.figure))


def interval_of(step: Step) -> tuple[int, int]:
    """The shortest and longest time over all variants and the machine itself."""
    inside = (report for name, report in step.variants.items() if not _is_without(name))
    times = [step.modelled.host_ps, *(report.host_ps for report in inside)]
    return min(times), max(times)


def print_sensitivity(
    kinds: Mapping[str, Sequence[Step]], machine: Machine, console: Console
) -> None:
    """Prints the intervals, if variants were modelled."""
    chosen = {kind: median_step(steps) for kind, steps in kinds.items()}
    names = [name for step in chosen.values() for name in step.variants]
    if any(map(_is_without, names)):
        _print_mechanisms(chosen, console)
    if all(map(_is_without, names)):
        return
    table = Table(title="steps over the ranges of assumed figures, modelled ms")
    for column in (
        "step",
        "total",
        "from",
        "to",
        "figure that moves it",
        "its range",
        "low",
        "high",
    ):
        table.add_column(
            column, justify="left" if column in ("step", "figure that moves it") else "right"
        )
    for kind, step in chosen.items():
        shortest, longest = interval_of(step)
        head = [kind, *(f"{ps / _MS:.3f}" for ps in (step.modelled.host_ps, shortest, longest))]
        for move in moves_of(step)[:_SHOWN]:
            if move.width == 0:
                break
            low, high = machine.ranges[move.figure]
            stated = machine.figures[move.figure]
            table.add_row(
                *head,
                move.figure,
                f"x {low / stated:.2f} to {high / stated:.2f}",
                *(f"{ps / _MS:.3f}" for ps in (move.low, move.high)),
            )
            head = ["", "", "", ""]
    console.print(table)
    machines = sum(not _is_without(name) for name in next(iter(chosen.values())).variants)
    console.print(
        f"Over {machines} machines: each of "
        f"{len(machine.ranges)} figures at both ends of its range, and machines with all figures "
        "drawn at random.",
        markup=False,
    )


def _print_mechanisms(chosen: Mapping[str, Step], console: Console) -> None:
    """Prints step times without each mechanism of the model."""
    table = Table(title="steps without a mechanism of the model, modelled ms")
    for column in ("step", "total", "without", "", "change"):
        table.add_column(column, justify="left" if column in ("step", "without") else "right")
    for kind, step in chosen.items():
        whole = step.modelled.host_ps
        head = [kind, f"{whole / _MS:.3f}"]
        for name, report in step.variants.items():
            if not _is_without(name):
                continue
            change = f"{report.host_ps / max(whole, 1) - 1:+.1%}"
            mechanism = name.removeprefix(f"{WITHOUT} ")
            table.add_row(*head, mechanism, f"{report.host_ps / _MS:.3f}", change)
            head = ["", ""]
    console.print(table)
