"""Intervals of time: lists of (begin, end), which may overlap."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

Time = TypeVar("Time", int, float)
Interval = tuple[float, float]


def union(intervals: Iterable[tuple[Time, Time]]) -> list[tuple[Time, Time]]:
    """The union as disjoint intervals in order."""
    merged: list[tuple[Time, Time]] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def length(intervals: Iterable[tuple[Time, Time]]) -> Time:
    """Total length of the union."""
    return sum(end - begin for begin, end in union(intervals))


def common(
    left: Iterable[tuple[Time, Time]], right: Iterable[tuple[Time, Time]]
) -> list[tuple[Time, Time]]:
    """The intersection of both."""
    second = union(right)
    return [
        (max(a, c), min(b, d)) for a, b in union(left) for c, d in second if max(a, c) < min(b, d)
    ]


def without(
    intervals: Iterable[tuple[Time, Time]], others: Sequence[tuple[Time, Time]]
) -> list[tuple[Time, Time]]:
    """Parts of `intervals` outside `others`; both are disjoint and in order."""
    rest: list[tuple[Time, Time]] = []
    first = 0
    for begin, end in intervals:
        while first < len(others) and others[first][1] <= begin:
            first += 1
        for other_begin, other_end in others[first:]:
            if other_begin >= end:
                break
            if other_begin > begin:
                rest.append((begin, other_begin))
            begin = max(begin, other_end)
        if begin < end:
            rest.append((begin, end))
    return rest
