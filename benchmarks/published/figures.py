"""Figures of a modelled step, and the result rows with them.

Functions that take a `View` are for `intervals.interval`; the others take a step of a dry-run
report.
"""

from __future__ import annotations

from typing import Any

from published.intervals import View
from published.runs import PS_PER_MS, PS_PER_SECOND, REQUESTS
from result import Kind, Row


def modelled(name: str, unit: str, ours: float, **fields: Any) -> Row:
    return Row(name, unit, ours, Kind.MODELLED, **fields)


def rate_of(view: View) -> float:
    return REQUESTS * PS_PER_SECOND / float(view["host_ps"])


def time_ratio_of(view: View, baseline: View) -> float:
    return float(view["host_ps"]) / float(baseline["host_ps"])


def ratio_of(view: View, baseline: View) -> float:
    return 1 / time_ratio_of(view, baseline)


def share_of_bound(view: View) -> float:
    return float(view["overlap_bound_ps"]) / float(view["host_ps"])


def share_of_resources(view: View) -> float:
    return float(view["resource_bound_ps"]) / float(view["host_ps"])


def communication_share(view: View) -> float:
    return float(view["communication_ps"]) / float(view["host_ps"])


def ms(step: dict[str, Any]) -> float:
    return host_ps(step) / PS_PER_MS


def host_ps(step: dict[str, Any]) -> float:
    return float(step["modelled"]["host_ps"])


def rate(step: dict[str, Any]) -> float:
    return REQUESTS * PS_PER_SECOND / host_ps(step)


def bound(step: dict[str, Any]) -> float:
    return REQUESTS * PS_PER_SECOND / float(step["overlap_bound_ps"])


def beside(ours: float, published: float) -> str:
    return f"published {published:g}, error {ours / published - 1:+.0%}"
