"""How long a dry-run in a process of its own may take."""

import os

_START_S = 600.0
_STEP_S = 2.0


def time_limit(steps: int) -> float:
    """Seconds for a start and so many steps of an engine, longer where this host is busy.

    A step takes 0.05 to 1 s on an idle host, a start 10 to 60 s; it is a limit for what hangs.
    """
    running_per_processor = os.getloadavg()[0] / (os.cpu_count() or 1)
    return (_START_S + _STEP_S * steps) * max(1.0, running_per_processor)
