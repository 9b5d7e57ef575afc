"""Time limit of a dry-run in a process of its own."""

import os

_START_S = 600.0
_STEP_S = 2.0


def time_limit(steps: int) -> float:
    """Limit in seconds for an engine's start and steps, longer if this host is busy.

    A step takes 0.05 to 1 s on an idle host, a start 10 to 60 s; the limit catches hangs.
    """
    running_per_processor = os.getloadavg()[0] / (os.cpu_count() or 1)
    return (_START_S + _STEP_S * steps) * max(1.0, running_per_processor)
