"""Writes the page with the results of other projects' tests."""

from pathlib import Path
from typing import Any

from reference_cells import GENERATED, cell

MOST_NAMES = 3  # of one file's tests, per cell


def conformance_page(records: list[dict[str, Any]]) -> str:
    """Formats results of other projects' suites, from the last recorded run of each."""
    text = "# Other projects' tests\n\n" + GENERATED.format(source="conformance/*/results.json")
    text += (
        "Other projects' tests for chips, run on the default virtual NPU (strict, Ascend910B3, "
        "CANN 8.5). Shares are of all tests in the files that ran, including tests that need an "
        "operator that is not exported and tests that skip themselves; a second share is of the "
        "tests whose operators are exported. A file is whole if none of its tests fails.\n\n"
        "| suite | what | version | selection | tests | passed | lack an operator | do not pass "
        "| skip themselves | passed of those with operators | files whole "
        "| files that lack an operator |\n"
        f"|{' --- |' * 12}\n"
    )
    text += "".join(map(_shares, records))
    for record in records:
        text += (
            f"\n## {record['suite']}\n\n"
            f"Again: `python3 -m nox -s conformance -- {record['suite']} "
            f"{record.get('arguments', '--checkout DIR')} --record`, "
            f"where DIR is {cell(record['source'])}.\n\n"
        )
        if rule := record.get("rule"):
            text += f"{rule}\n\n"
        if left_out := record.get("cases_left_out"):
            text += f"{left_out} cases are left out: of each function an even sample runs.\n\n"
        if kernels := record.get("kernels"):
            text += f"Tests that pass launch {kernels} Triton kernels.\n\n"
        if excluded := record.get("excluded"):
            left_out = "; ".join(f"{number}, which {why}" for why, number in excluded.items())
            text += f"Files that are not run: {cell(left_out)}.\n\n"
        text += "| why tests do not pass | tests | |\n| --- | --- | --- |\n"
        unexplained = sorted(record["unexplained"])
        reasons = record["reasons"] | ({"no reason is known": unexplained} if unexplained else {})
        for why, tests in reasons.items():
            names = cell(", ".join(_short_names(tests)))
            text += f"| {cell(why)} | {len(tests)} | {names} |\n"
    return text


def _shares(record: dict[str, Any]) -> str:
    """Formats a suite's table line."""
    able = record["passed"] + record["not_passed"]
    total = able + record["lacks_operator"] + record["skipped"]
    numbers = (record[key] for key in ("passed", "lacks_operator", "not_passed", "skipped"))
    cells = [
        f"[{record['suite']}](#{record['suite']})",
        cell(record["what"]),
        record["version"],
        record["selection"],
        str(total),
        *(f"{number}, {100 * number / total:.1f} %" for number in numbers),
        _share(record["passed"], able),
        _share(record["files_whole"], record["files"]),
        _share(record["files_lacking_an_operator"], record["files"]),
    ]
    return f"| {' | '.join(cells)} |\n"


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole}, {100 * part / whole:.1f} %"


def _short_names(tests: list[str]) -> list[str]:
    """Shortens names to `test_stream.py::test_priority`; several tests of a file to its name and
    their number.
    """
    of_file: dict[str, list[str]] = {}
    for test in tests:
        path, *names = test.split("::")
        of_file.setdefault(_short_path(path), []).append(names[-1] if names else "")
    return [
        f"`{file}` ({len(names)})"
        if len(names) > MOST_NAMES
        else ", ".join(f"`{file}::{name}`" if name else f"`{file}`" for name in names)
        for file, names in of_file.items()
    ]


def _short_path(path: str) -> str:
    """Shortens a path to the file's name, or folder and name if the name alone is not
    descriptive.
    """
    *_, folder, name = ("", *Path(path).parts)
    return name if "." in name or name.startswith("test_") else f"{folder}/{name}"
