"""Compares two result files: `python benchmarks/compare.py BEFORE.json AFTER.json`."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from result import FORMAT
from result_table import figure, figure_table, number


class ResultFileError(Exception):
    """A file is not a result, or two results are not comparable."""


def read(path: Path) -> dict[str, Any]:
    """Reads a result file; raises ResultFileError that names the file and the cause."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ResultFileError(f"{path}: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ResultFileError(f"{path} is not a result of format {FORMAT}: write it with --json")
    return content


def compare(before: dict[str, Any], after: dict[str, Any], console: Console) -> None:
    """Prints each figure that both results have, with its change, and all other differences."""
    if before["benchmark"] != after["benchmark"]:
        raise ResultFileError(
            f"different benchmarks: {before['benchmark']} and {after['benchmark']}"
        )
    console.print(Text(before["benchmark"], style="bold"))
    table = figure_table("before", "after", "change", "ratio before", "ratio after")
    earlier_rows = {row["name"]: row for row in before["rows"]}
    for row in after["rows"]:
        earlier = earlier_rows.pop(row["name"], None)
        if earlier is None or (earlier["unit"], earlier["kind"]) != (row["unit"], row["kind"]):
            continue
        table.add_row(
            figure(row["name"], row["unit"], row["kind"]),
            number(earlier["ours"]),
            number(row["ours"]),
            f"{row['ours'] / earlier['ours'] - 1:+.1%}" if earlier["ours"] else "",
            number(earlier["ratio"]),
            number(row["ratio"]),
        )
    console.print(table)
    for section in ("settings", "versions", "host"):
        for name in sorted(before[section].keys() | after[section].keys()):
            values = [side[section].get(name, "absent") for side in (before, after)]
            if values[0] != values[1]:
                console.print(f"{section}: {name} {values[0]} -> {values[1]}", markup=False)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    options = parser.parse_args(arguments)
    try:
        compare(read(options.before), read(options.after), Console())
    except ResultFileError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
