"""Calls that wait for a dead engine are told, and nothing else of the heap is held meanwhile."""

from __future__ import annotations

import queue
import threading
import weakref

from vllm.v1.engine.core_client import SyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_davinci.core.process.waiting_callers import tell_waiting_callers

LIMIT_S = 30.0


class Resources:
    """Those of a client whose engine has died, which tells so when it may."""

    def __init__(self) -> None:
        self.asked, self.may_tell = threading.Event(), threading.Event()

    @property
    def engine_dead(self) -> bool:
        self.asked.set()
        self.may_tell.wait(LIMIT_S)
        return True


class Passing:
    """An object of the program."""


def test_who_tells_holds_nothing_but_the_clients():
    # The interpreter ends around a thread that still runs, with all that its frames hold: libraries
    # that list what was never freed would list everything.
    client = SyncMPClient.__new__(SyncMPClient)
    resources = Resources()
    client.resources, client.outputs_queue, client.utility_results = resources, queue.Queue(), {}
    passing = Passing()
    is_there = weakref.ref(passing)
    teller = threading.Thread(target=tell_waiting_callers, daemon=True)
    teller.start()
    assert resources.asked.wait(LIMIT_S)
    del passing
    assert is_there() is None
    resources.may_tell.set()
    teller.join(LIMIT_S)
    assert isinstance(client.outputs_queue.get_nowait(), EngineDeadError)
