"""Differences of two reports by name: values, figures beyond a tolerance, bounds."""

from typing import Any

import pytest

from vllm_davinci.verify.comparison import ABSENT, differences
from vllm_davinci.verify.finding import Finding, Kind


def report(*findings: Finding, part: str = "part") -> dict[str, Any]:
    told = [finding.fields() for finding in findings]
    return {"format": 1, "parts": [{"name": part, "findings": told}]}


def names(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [each.name for each in differences(one, other)]


@pytest.mark.parametrize(
    ("kind", "one", "other", "differs"),
    [
        (Kind.EXACT, "taken", "161002", True),
        (Kind.EXACT, "taken", "taken", False),
        (Kind.EXACT, [[1, 2], [3]], [[1, 2], [4]], True),
        (Kind.FIGURE, 10.0, 10.9, False),
        (Kind.FIGURE, 10.0, 11.1, True),
        (Kind.FIGURE, 10.0, 9.0, True),
        (Kind.FIGURE, 0.0, 0.0, False),
        (Kind.FIGURE, 0.0, 1.0, True),
        (Kind.NOTE, "this", "that", False),
    ],
)
def test_values_differ_by_the_kind_of_their_finding(kind, one, other, differs):
    pair = report(Finding("part/a", one, kind)), report(Finding("part/a", other, kind))
    assert names(*pair) == (["part/a"] if differs else [])


def test_errors_differ_where_only_one_keeps_its_bound() -> None:
    def error(value: float | str, passed: bool, message: str = "") -> dict[str, Any]:
        details = {"message": message} if message else {}
        found = Finding("part/a", value, Kind.ERROR, bound=0.01, passed=passed, details=details)
        return report(found)

    assert not names(error(0.001, True), error(0.009, True))
    [found] = differences(error(0.001, True), error(0.2, False))
    assert (found.one, found.other) == (0.001, 0.2) and "only the first keeps" in found.why
    assert names(error(0.3, False), error(0.2, False))
    assert names(error("failed", False, "status 1"), error("failed", False, "status 2"))
    assert not names(error("failed", False, "status 1"), error("failed", False, "status 1"))


def test_missing_findings_are_reported_once_for_a_whole_part() -> None:
    one = report(Finding("part/a", 1), Finding("part/b", 2))
    [found] = differences(one, report(Finding("part/a", 1)))
    assert (found.name, found.one, found.other) == ("part/b", 2, ABSENT)
    [found] = differences(one, {"format": 1, "parts": []})
    assert (found.name, found.one, found.other) == ("part", "ran", ABSENT)
