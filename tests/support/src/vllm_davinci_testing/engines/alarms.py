"""Lines of output that look like problems."""

import re

_ALARM = re.compile(r"WARNING|ERROR|CRITICAL|Traceback|\[W\d{4} |Warning:|nanobind|leaked")
# About this machine's limits, and about an option set by tests.
_EXPLAINED = re.compile(r"Found ulimit of|Enforce eager set")


def alarming_lines(output: str) -> list[str]:
    """Suspicious lines of a program's output, except those caused by machine or test options."""
    return [
        line for line in output.splitlines() if _ALARM.search(line) and not _EXPLAINED.search(line)
    ]
