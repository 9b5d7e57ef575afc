"""A piece of a part that runs, or fails, by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from vllm_davinci.verify.finding import Finding


class Case(NamedTuple):
    """
    name: of the finding that stands for the case where it fails; findings of its own begin so
    run:  on the device; what it raises becomes a finding
    """

    name: str
    run: Callable[[], Iterable[Finding]]
