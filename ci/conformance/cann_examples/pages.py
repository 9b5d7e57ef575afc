"""Samples of output on the pages of CANN's examples, held against what the programs print.

Pages of the runtime's examples have a section "Sample Output"; pages of operators give no results.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_SECTION = re.compile(r"^## Sample Output\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
# In place of what differs from one machine to the next: "...", "<stream_pointer>", "8.x.x", an
# address; versions and times with a fraction, which pages give of one machine.
_DIFFERS = re.compile(
    r"\.\.\.|<\w+>|\b\d+\.x\.x\b|0x[0-9a-fA-F]{8,}"
    r"|(?<=version string: )\S+|(?<=version number: )\d+|\d+(?:\.\d+)?(?= ?(?:ms|us|ns)\b)"
)


def sample_output(page: str, script: str = "") -> tuple[tuple[str, ...], ...]:
    """The lines that a page says the program prints, once for each of its samples.

    A page has several where they depend on the runtime's release.

    script: what starts the program; lines that this one prints are left out
    """
    section = _SECTION.search(page)
    blocks = _BLOCK.findall(section.group(1)) if section else []
    flat = " ".join(script.split())
    samples = []
    for block in blocks:
        lines = (" ".join(line.split()) for line in block.splitlines())
        samples.append(
            tuple(
                line
                for line in lines
                if _DIFFERS.sub("", line).strip() and not _pattern(line).search(flat)
            )
        )
    return tuple(samples)


def not_printed(samples: Sequence[Sequence[str]], printed: Iterable[str]) -> list[str]:
    """The lines of the sample that comes closest which no printed one contains, in any order."""
    text = "\n".join(" ".join(line.split()) for line in printed)
    missing = [[line for line in each if not _pattern(line).search(text)] for each in samples]
    return min(missing, key=len, default=[])


def is_expected(line: str, samples: Iterable[Iterable[str]]) -> bool:
    """Whether a printed line is one that the page has."""
    flat = " ".join(line.split())
    return any(_pattern(each).search(flat) for sample in samples for each in sample)


def _pattern(line: str) -> re.Pattern[str]:
    parts, end = [], 0
    for found in _DIFFERS.finditer(line):
        parts += [re.escape(line[end : found.start()]), r"[^\n]*"]
        end = found.end()
    return re.compile("".join(parts) + re.escape(line[end:]))
