"""Runs several collectives, and the work between them, as one switching point of ubatches."""

from collections.abc import Callable
from typing import TypeVar

from vllm_davinci.core import components

T = TypeVar("T")


def run_beside_ubatches(work: Callable[[], T]) -> T:
    """Runs `work`, which calls collectives; inside a ubatch, the other ubatches compute meanwhile.

    work: runs, in a ubatch, on its own side stream, after the current stream's work so far. Returns
          tensors, or tuples of them; the caller must hold its inputs until this returns. Its matrix
          products should be small, since the other ubatch computes at the same time.
    """
    scheduler = components.stream_scheduler()
    if scheduler is None:
        return work()
    result: T = scheduler.communicate(work, on="exchange")
    return result
