"""Who notices that a process has ended or stopped, and what follows for those that wait for it.

| gone | noticed by | then |
| --- | --- | --- |
| the server or program, without a word | a worker, once a second | its engine ends |
| an engine's process | its workers, once a second | they end, in the middle of a step too |
| another engine of the same server | the first rank of each engine, at once | all engines end |
| a rank that is stopped | the others on its host, once a second | `StoppedRanks` reports it |
"""

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from vllm.config import ParallelConfig

from vllm_davinci.core.config.time_limits import LONGER_WAIT, StepLimits
from vllm_davinci.core.distributed.engine_ring import EngineRing, size_of_ring
from vllm_davinci.core.distributed.fault_channel import Fault, status_of
from vllm_davinci.core.log import init_logger
from vllm_davinci.core.process.engine_exit import is_of_engine
from vllm_davinci.core.process.fault_report import leave_report

logger = init_logger(__name__)

ENGINE = "EngineCore"
LOOKS_EVERY_S = 1.0
# How long an engine without a program has to end in order.
ENGINE_ENDS_WITHIN_S = 5.0
# How long a worker without an engine has: vLLM ends those that are in no step, and the step guard
# those of several ranks.
WORKER_ENDS_WITHIN_S = 6.0


# --- the program, and the engine ------------------------------------------------------------


def end_with_program() -> None:
    """Starts to look after this worker's engine and its program, from a thread of its own.

    vLLM's workers notice that their engine's process has ended, when their step is over. The engine
    does not notice the end of the server or program that has started it: killed, aborted, out of
    memory. Does nothing where the engine has no process beside the program's.
    """
    own = multiprocessing.current_process()
    if own.name.startswith(ENGINE):
        parent = multiprocessing.parent_process()
        engine, program = os.getpid(), parent.pid if parent is not None else None
    elif _is_engine(os.getppid()):
        engine = os.getppid()
        program = _parent_of(engine)
    else:
        return
    if program is not None:
        arguments = (engine, program)
        threading.Thread(target=_watch, args=arguments, name="program", daemon=True).start()


def _watch(engine: int, program: int) -> None:
    while (parent := _parent_of(engine)) == program:
        time.sleep(LOOKS_EVERY_S)
    if parent is not None:
        logger.error(
            "The program of this engine (pid %d) has ended without a word, so the engine (pid %d) "
            "ends too. The program's own output, or the kernel's log, says why.",
            program,
            engine,
        )
        with suppress(ProcessLookupError):
            os.kill(engine, signal.SIGTERM)
            time.sleep(ENGINE_ENDS_WITHIN_S)
            os.kill(engine, signal.SIGKILL)
    time.sleep(WORKER_ENDS_WITHIN_S)
    leave_at_once()


def _parent_of(pid: int) -> int | None:
    """The number of its parent; None where the process has ended."""
    state, *rest = status_of(pid)
    return int(rest[0]) if state not in ("", "Z", "X") else None


def _is_engine(pid: int) -> bool:
    """By the title that vLLM gives it."""
    try:
        return ENGINE.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def leave_at_once(status: int = 1, exit: Callable[[int], None] = os._exit) -> None:
    """Ends this process without its handlers at exit; what it has said is flushed."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    exit(status)


# --- other engines --------------------------------------------------------------------------


def end_with_other_engines(parallel: ParallelConfig, rank: int) -> EngineRing | None:
    """Makes this process end when that of another engine does. None where nobody has to.

    rank: of this process in its engine, for which the first one speaks
    """
    if rank != 0 or size_of_ring(parallel) == 1 or not is_of_engine():
        return None
    return EngineRing(parallel, _end)


def _end(lost: Fault) -> None:
    cause = (
        f"{lost}. The server gives a part of its requests to that data-parallel engine, and would "
        "wait for their answers, so all engines end."
    )
    leave_report(cause)
    logger.error("%s", cause)
    leave_at_once()


# --- ranks that are stopped -----------------------------------------------------------------


class StoppedRanks:
    """Finds a rank that was stopped before it can have answered a call, and stays so.

    A collective names a rank that does not come. Where no rank waits in one, as between stages of a
    pipeline, or where the stopped rank is the one that replies to vLLM, nothing would before vLLM's
    own limit, which cannot say for whom it has waited.

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
