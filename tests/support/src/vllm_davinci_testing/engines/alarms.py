"""Lines of output that look like problems."""

import re

_ALARM = re.compile(r"WARNING|ERROR|CRITICAL|Traceback|\[W\d{4} |Warning:|nanobind|leaked")
# Caused by this machine's limits, or by an option of tests.
_EXPLAINED = re.compile(r"Found ulimit of|Enforce eager set")


def alarming_lines(output: str) -> list[str]:
    """Returns suspicious lines of a program's output, except those caused by machine or test
    options.
    """
    return [
        line for line in output.splitlines() if _ALARM.search(line) and not _EXPLAINED.search(line)
    ]
