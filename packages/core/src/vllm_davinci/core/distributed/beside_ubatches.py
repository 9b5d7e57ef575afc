"""Several collectives, and the work between them, as one switching point of ubatches."""

from collections.abc import Callable
from typing import TypeVar

from vllm_davinci.core import components

T = TypeVar("T")


def run_beside_ubatches(work: Callable[[], T]) -> T:
    """Runs `work`, which calls collectives; inside a ubatch, the others compute meanwhile.

    work: runs on a side stream of its own then, after what the current stream has so far. It
          returns tensors, or tuples of them; what it reads must be held by the caller until this
          returns. Its matrix products should be small: the other ubatch computes beside them.
    """
    scheduler = components.stream_scheduler()
    if scheduler is None:
        return work()
    result: T = scheduler.communicate(work, on="exchange")
    return result
