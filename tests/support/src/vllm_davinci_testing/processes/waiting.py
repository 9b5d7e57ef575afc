"""Waits with a limit, for processes on a busy machine."""

import time
from collections.abc import Callable

INTERVAL_S = 0.05


def becomes_true(condition: Callable[[], object], limit_s: float) -> bool:
    """Waits for `condition`; returns False after the limit.

    Only time in which this process runs counts, because a suspended machine also suspends the
    awaited process.
    """
    waited_s = 0.0
    before = time.monotonic()
    while not condition():
        if waited_s > limit_s:
            return False
        time.sleep(INTERVAL_S)
        now = time.monotonic()
        waited_s += min(now - before, 20 * INTERVAL_S)
        before = now
    return True
