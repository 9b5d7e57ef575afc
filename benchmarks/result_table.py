"""Prints a result as a table that is readable at 80 columns."""

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from result import Result, Row


def print_result(result: Result, console: Console) -> None:
    console.print(Text(f"{result.benchmark} on {result.device}", style="bold"))
    console.print(Text(f"ours: {result.ours}"))
    console.print(Text(f"baseline: {result.baseline or 'none'}"))
    console.print(_table(result.rows))
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


def _table(rows: list[Row]) -> Table:
    """Makes the table: only figures' names wrap, and columns without values are omitted."""
    columns = {
        "ours": [_ours(row) for row in rows],
        "baseline": [Text(number(row.baseline)) for row in rows],
        "ratio": [Text(number(row.ratio)) for row in rows],
        "bound": [Text(number(row.bound)) for row in rows],
        "interval": [_interval(row) for row in rows],
        "goal": [_goal(row) for row in rows],
    }
    columns = {name: cells for name, cells in columns.items() if any(map(len, cells))}
    table = figure_table(*columns)
    for row, *cells in zip(rows, *columns.values(), strict=True):
        table.add_row(figure(row.name, row.unit, row.kind.value), *cells)
    return table


def figure_table(*columns: str) -> Table:
    """Makes an empty table with a column for the figures' names, and narrow columns for numbers."""
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1), leading=1)
    table.add_column("figure", overflow="fold")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def figure(name: str, unit: str, kind: str) -> Text:
    """Formats a figure's name, with its unit and kind below it."""
    return Text(name).append(f"\n[{unit}, {kind}]", style="dim")


def number(value: float | None) -> str:
    """Formats a figure with four significant digits; integers are not rounded."""
    if value is None:
        return ""
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"


def _ours(row: Row) -> Text:
    """Formats the value, with its quartiles below it."""
    text = Text(number(row.ours))
    if row.quartiles is not None:
        text.append("\n" + " to\n".join(map(number, row.quartiles)), style="dim")
    return text


def _interval(row: Row) -> Text:
    return Text("" if row.interval is None else " to\n".join(map(number, row.interval)))


def _goal(row: Row) -> Text:
    limits = [
        f"{sign} {number(limit)}"
        for sign, limit in ((">=", row.at_least), ("<=", row.at_most))
        if limit is not None
    ]
    if not limits:
        return Text()
    met, style = ("met", "green") if row.is_met else ("MISSED", "bold red")
    return Text("\n".join(limits) + "\n").append(met, style=style)
