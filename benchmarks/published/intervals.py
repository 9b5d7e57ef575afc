"""Figures of dry-runs on all machines whose assumed figures lie within their ranges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

View = dict[str, Any]
"""A step on one machine: host_ps, communication_ps, overlap_bound_ps, resource_bound_ps."""


def on_each_machine(*steps: dict[str, Any]) -> Iterator[tuple[View, ...]]:
    """These steps on the stated machine, then on each variant that all of them have."""
    yield tuple(step["brief"] for step in steps)
    names = set.intersection(*(set(step["variants"]) for step in steps))
    for name in sorted(names):
        yield tuple(step["variants"][name] for step in steps)


def interval(figure: Callable[..., float], *steps: dict[str, Any]) -> tuple[float, float]:
    """The smallest and the largest value of a figure of these steps over all machines."""
    values = [figure(*views) for views in on_each_machine(*steps)]
    return min(values), max(values)
