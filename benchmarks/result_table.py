"""A result as a table on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from result import Result, Row


def print_result(result: Result, console: Console) -> None:
    table = Table(title=f"{result.benchmark} on {result.device}", title_justify="left")
    table.add_column("figure")
    table.add_column(result.ours, justify="right")
    table.add_column(result.baseline or "no baseline", justify="right")
    for column in ("ratio", "bound", "goal"):
        table.add_column(column, justify="right")
    table.add_column("kind")
    for row in result.rows:
        table.add_row(
            f"{row.name} [{row.unit}]".replace("[", "\\["),
            number(row.ours) + _spread(row),
            number(row.baseline),
            number(row.ratio),
            number(row.bound),
            _goal(row),
            row.kind.value,
        )
    console.print(table)
    for row in result.rows:
        if row.note:
            console.print(f"{row.name}: {row.note}", markup=False)
    if result.bounded_by:
        console.print(f"bounded by: {result.bounded_by}", markup=False)
    for title, facts in (
        ("settings", {**result.settings, "seed": result.seed}),
        ("versions", result.versions),
        ("host", result.host),
    ):
        shown = ", ".join(f"{name} {value}" for name, value in facts.items())
        console.print(f"{title}: {shown}", markup=False, style="dim")


def number(value: float | None) -> str:
    """A figure with four significant digits; integers whole."""
    if value is None:
        return ""
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"


def _spread(row: Row) -> str:
    return "" if row.quartiles is None else f" ({'..'.join(map(number, row.quartiles))})"


def _goal(row: Row) -> str:
    limits = [
        f"{sign}{number(limit)}"
        for sign, limit in ((">=", row.at_least), ("<=", row.at_most))
        if limit is not None
    ]
    if not limits:
        return ""
    return f"{' '.join(limits)} {'met' if row.is_met else 'MISSED'}"
