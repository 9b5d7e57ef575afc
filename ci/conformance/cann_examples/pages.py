"""What the pages of CANN's examples say that the programs print, and whether they do.

Pages of the runtime's examples have a section "Sample Output"; pages of operators give no results.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_SECTION = re.compile(r"^## Sample Output\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
# In place of what differs from one machine to the next: "...", "<stream_pointer>", "8.x.x", an
# address; versions and times with a fraction, which pages give of one machine.
_DIFFERS = re.compile(
    r"\.\.\.|<\w+>|\b\d+\.x\.x\b|0x[0-9a-fA-F]{8,}"
    r"|(?<=version string: )\S+|(?<=version number: )\d+|\d+(?:\.\d+)?(?= ?(?:ms|us|ns)\b)"
)


def sample_output(page: str, script: str = "") -> tuple[str, ...]:
    """The lines that a page's first sample of output has and that the program prints itself.

    script: what starts the program; lines that this one prints are left out
    """
    section = _SECTION.search(page)
    block = _BLOCK.search(section.group(1)) if section else None
    if block is None:
        return ()
    lines = (" ".join(line.split()) for line in block.group(1).splitlines())
    flat = " ".join(script.split())
    return tuple(
        line for line in lines if _DIFFERS.sub("", line).strip() and not _pattern(line).search(flat)
    )


def not_printed(expected: Iterable[str], printed: Iterable[str]) -> list[str]:
    """The expected lines that no printed one contains, in this order or another."""
    text = "\n".join(" ".join(line.split()) for line in printed)
    return [line for line in expected if not _pattern(line).search(text)]


def is_expected(line: str, expected: Iterable[str]) -> bool:
    """Whether a printed line is one that the page has."""
    return any(_pattern(each).search(" ".join(line.split())) for each in expected)


def _pattern(line: str) -> re.Pattern[str]:
    parts, end = [], 0
    for found in _DIFFERS.finditer(line):
        parts += [re.escape(line[end : found.start()]), r"[^\n]*"]
        end = found.end()
    return re.compile("".join(parts) + re.escape(line[end:]))
