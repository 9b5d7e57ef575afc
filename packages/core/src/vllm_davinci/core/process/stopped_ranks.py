"""Looks for ranks of this engine on this host whose processes are stopped while a call waits.

A collective names a rank that does not come. Where no rank waits in one, as between stages of a
pipeline, or where the stopped rank is the one that replies to vLLM, nothing would before vLLM's own
limit, which cannot say for whom it has waited.
"""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from vllm_davinci.core.config.time_limits import LONGER_WAIT, StepLimits
from vllm_davinci.core.distributed.fault_channel import Fault

LOOKS_EVERY_S = 1.0


class StoppedRanks:
    """Finds a rank that was stopped before it can have answered a call, and stays so.

    All ranks of an engine are given the same calls: one that this rank was given after the other
    one had stopped waits for that one too, and so may one of the second before it was seen. A
    stopped rank that nobody waits for is left alone.

    now:     those that are stopped
    calls:   how many calls this rank has begun
    is_busy: whether it is in one
    on_late: called in this thread with a fault that says for how long which rank was waited for
    """

    def __init__(
        self,
        now: Callable[[], Iterable[Fault]],
        calls: Callable[[], int],
        is_busy: Callable[[], bool],
        on_late: Callable[[Fault], None],
    ) -> None:
        self._now, self._calls, self._is_busy, self._on_late = now, calls, is_busy, on_late
        self._limit_s = StepLimits.of_environment().stopped_process.total_seconds()
        self._calls_before = calls()
        self._seen: dict[int, tuple[int, float | None]] = {}
        threading.Thread(target=self._watch, name="stopped ranks", daemon=True).start()

    def _watch(self) -> None:
        while True:
            time.sleep(LOOKS_EVERY_S)
            self.look(time.monotonic())

    def look(self, at_s: float) -> None:
        """Looks once. at_s: the time by a clock that goes on evenly"""
        calls = self._calls()
        seen: dict[int, tuple[int, float | None]] = {}
        for rank in self._now():
            first_calls, since_s = self._seen.get(rank.rank, (self._calls_before, None))
            if since_s is None and (calls > first_calls or self._is_busy()):
                since_s = at_s
            seen[rank.rank] = (first_calls, since_s)
            if since_s is not None and at_s - since_s >= self._limit_s:
                self._on_late(replace(rank, cause=self._words(calls, at_s - since_s)))
        self._calls_before, self._seen = calls, seen

    @staticmethod
    def _words(calls: int, waited_s: float) -> str:
        return (
            f"is stopped, by SIGSTOP or a debugger, and call {calls} of its worker has waited "
            f"{waited_s:.0f} s for it. {LONGER_WAIT}"
        )
