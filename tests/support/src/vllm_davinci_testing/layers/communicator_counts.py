"""Counts launches between ranks, and the host's waits, in a part of a program."""

import collections
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm_davinci.core.distributed.communicator import NPUCommunicator
from vllm_davinci.vnpu import _C

# The host's waits, as counted by the virtual devices.
HOST = ("synchronizations", "copies_to_host")


@contextmanager
def counting(counts: collections.Counter[str]) -> Iterator[None]:
    """Counts our communicators' launches, and the host's waits and copies meanwhile."""
    launch_one, launch_own = NPUCommunicator._collective, NPUCommunicator.launch_own

    def count(self: NPUCommunicator, name: str, *arguments: Any, **options: Any) -> None:
        counts[f"{self.unique_name.split(':')[0]} {name}"] += 1
        launch_one(self, name, *arguments, **options)

    def count_own(self: NPUCommunicator, launch: Callable[[], Any]) -> Any:
        counts[f"{self.unique_name.split(':')[0]} launch"] += 1
        return launch_own(self, launch)

    NPUCommunicator._collective = count  # type: ignore[method-assign]
    NPUCommunicator.launch_own = count_own  # type: ignore[method-assign]
    before = _C.host_counts()
    try:
        yield
    finally:
        NPUCommunicator._collective = launch_one  # type: ignore[method-assign]
        NPUCommunicator.launch_own = launch_own  # type: ignore[method-assign]
        after = _C.host_counts()
        counts.update({name: after[name] - before[name] for name in HOST})
