"""Binds each worker's threads to its own cores."""

import os
from collections.abc import Collection

from vllm_davinci.core.log import init_logger

logger = init_logger(__name__)

# torch_npu's own variable for binding threads to cores.
CPU_AFFINITY = "CPU_AFFINITY_CONF"


def share_of_cores(cores: Collection[int], rank: int, count: int) -> list[int]:
    """Cores of one of `count` processes: consecutive, equally many; [] if there are too few.

    cores: the cores that the processes may use
    rank:  number of the process, from 0
    """
    ordered = sorted(cores)
    each = len(ordered) // count
    return ordered[rank * each : (rank + 1) * each]


def bind_threads(rank: int, count: int) -> None:
    """Binds every thread of this process, and later ones, to the process's share of cores.

    Does nothing if torch_npu binds them.
    """
    if (by_torch_npu := os.environ.get(CPU_AFFINITY, "0")) not in ("", "0"):
        logger.warning(
            "enable_cpu_binding has no effect: %s=%s lets torch_npu bind threads.",
            CPU_AFFINITY,
            by_torch_npu,
        )
        return
    cores = os.sched_getaffinity(0)
    own = share_of_cores(cores, rank, count)
    if not own:
        logger.warning(
            "enable_cpu_binding has no effect: %d workers share %d cores.", count, len(cores)
        )
        return
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), own)
        except ProcessLookupError:
            continue  # the thread has ended in the meantime
    logger.info("Worker %d runs on cores %s.", rank, ", ".join(map(str, own)))
