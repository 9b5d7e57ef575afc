"""Lines that look as if something were wrong."""

from __future__ import annotations

import re

_ALARM = re.compile(r"WARNING|ERROR|CRITICAL|Traceback|\[W\d{4} |Warning:|nanobind|leaked")
# About this machine's limits, and about an option that tests set.
_EXPLAINED = re.compile(r"Found ulimit of|Enforce eager set")


def alarming_lines(output: str) -> list[str]:
    """Those of a program's output, without what the machine and the test's options bring about."""
    return [
        line for line in output.splitlines() if _ALARM.search(line) and not _EXPLAINED.search(line)
    ]
