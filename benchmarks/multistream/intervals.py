"""Intervals of time: lists of (begin, end) that may overlap."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as disjoint intervals in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Their time together, each moment once."""
    return sum(end - begin for begin, end in union(intervals))


def common(left: Iterable[Interval], right: Iterable[Interval]) -> list[Interval]:
    """The time that lies in both."""
    second = union(right)
    return [
        (max(a, c), min(b, d)) for a, b in union(left) for c, d in second if max(a, c) < min(b, d)
    ]
