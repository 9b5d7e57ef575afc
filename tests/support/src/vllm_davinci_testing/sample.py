"""Which thorough cases run today: a few of each grid, other ones every day, the same all day.

A grid is all thorough cases of one test function. `pytest -m thorough` runs every one of them;
without it the sample runs, chosen by the date alone, so that `--sample-date` repeats it anywhere.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable

# A grid smaller than this has a case in the sample on some days only.
CASES_PER_SAMPLED_CASE = 60


def sampled(node_ids: Iterable[str], date: str) -> set[str]:
    """The node ids of thorough cases that run on a date.

    A grid of n cases has n / CASES_PER_SAMPLED_CASE of them on average: the whole part every day,
    one more on as many days as the rest says.
    """
    grids: dict[str, list[str]] = defaultdict(list)
    for node_id in node_ids:
        grids[node_id.split("[")[0]].append(node_id)
    chosen: set[str] = set()
    for grid, cases in grids.items():
        whole, rest = divmod(len(cases), CASES_PER_SAMPLED_CASE)
        count = whole + (_fraction(date, grid) < rest / CASES_PER_SAMPLED_CASE)
        chosen.update(sorted(cases, key=lambda case: _fraction(date, case))[:count])
    return chosen


def _fraction(date: str, name: str) -> float:
    """A number in [0, 1) that looks random and depends on the two texts alone."""
    return int.from_bytes(hashlib.sha256(f"{date} {name}".encode()).digest()[:8], "big") / 2**64
