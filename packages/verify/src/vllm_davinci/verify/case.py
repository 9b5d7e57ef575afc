"""One case of a part; a failing case does not stop the others."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from vllm_davinci.verify.finding import Finding


class Case(NamedTuple):
    """
    name: name of the finding if the case fails, and prefix of its own findings
    run:  runs the case on the device; an exception becomes a finding
    """

    name: str
    run: Callable[[], Iterable[Finding]]
