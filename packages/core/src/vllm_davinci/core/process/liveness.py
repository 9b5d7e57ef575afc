"""Detects processes that have ended or stopped, and ends what would wait for them.

| gone | noticed by | then |
| --- | --- | --- |
| the server or program, killed or crashed | a worker, once a second | its engine ends |
| a socket of either, closed | a worker, once a second | the socket's file is removed |
| an engine's process | its workers, once a second | they end, in the middle of a step too |
| another engine of the same server | the first rank of each engine, at once | all engines end |
| a rank that is stopped | the others on its host, once a second | `StoppedRanks` reports it |
"""

import atexit
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

import psutil
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
# Time for an engine without a program to end normally.
ENGINE_ENDS_WITHIN_S = 5.0
# Time for a worker without an engine to end: vLLM ends idle workers, the step guard those that wait
# for another rank.
WORKER_ENDS_WITHIN_S = 6.0


# --- the program, and the engine ------------------------------------------------------------


class SocketFiles:
    """Files of the sockets that a program and its processes have while its engine starts.

    libzmq does not remove the file of a socket that it closes. vLLM removes neither the file of the
    socket for the engine's start nor those of a process that Ctrl-C ends early.
    """

    def __init__(self, program: int) -> None:
        self._files: set[str] = set()
        with suppress(psutil.Error):
            own = psutil.Process(program)
            for process in (own, *own.children(recursive=True)):
                with suppress(psutil.Error):
                    names = (str(each.laddr) for each in process.net_connections("unix"))
                    self._files |= {name for name in names if name.startswith("/")}

    def remove_closed(self) -> None:
        """Removes the files of sockets that no process has any more."""
        bound = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()}
        for file in map(Path, self._files - bound):
            if file.is_socket():
                file.unlink(missing_ok=True)
        self._files &= bound


def end_with_program() -> None:
    """Starts a thread that watches this worker's engine and its program.

    vLLM's workers notice the end of their engine's process when their step is over. The engine does
    not notice the end of the server or program that started it: killed, aborted, out of memory.
    Does nothing if the engine runs in the program's process.
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
        sockets = SocketFiles(program)
        atexit.register(sockets.remove_closed)
        arguments = (engine, program, sockets)
        threading.Thread(target=_watch, args=arguments, name="program", daemon=True).start()


def _watch(engine: int, program: int, sockets: SocketFiles) -> None:
    while (parent := _parent_of(engine)) == program:
        sockets.remove_closed()
        time.sleep(LOOKS_EVERY_S)
    sockets.remove_closed()
    if parent is not None:
        logger.error(
            "The program of this engine (pid %d) was killed or crashed, so the engine (pid %d) "
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
    """The parent's pid; None if the process has ended."""
    state, *rest = status_of(pid)
    return int(rest[0]) if state not in ("", "Z", "X") else None


def _is_engine(pid: int) -> bool:
    """True if the process has the title that vLLM gives engines."""
    try:
        return ENGINE.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def leave_at_once(status: int = 1, exit: Callable[[int], None] = os._exit) -> None:
    """Ends this process without exit handlers, after flushing its output."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    exit(status)


# --- other engines --------------------------------------------------------------------------


def end_with_other_engines(parallel: ParallelConfig, rank: int) -> EngineRing | None:
    """Ends this process when another engine's process ends. None without other engines to watch.

    rank: of this process in its engine; only the first one joins the ring
    """
    if rank != 0 or size_of_ring(parallel) == 1 or not is_of_engine():
        return None
    return EngineRing(parallel, _end)


def _end(lost: Fault) -> None:
    cause = (
        f"{lost}. The server sends a part of its requests to that data-parallel engine and "
        "would wait for it, so all engines end."
    )
    leave_report(cause)
    logger.error("%s", cause)
    leave_at_once()


# --- stopped ranks --------------------------------------------------------------------------


class StoppedRanks:
    """Finds a rank that was stopped before it could answer a call, and stays stopped.

    If others wait in a collective, its timeout names the stopped rank. If none does, as between
    pipeline stages, or if the stopped rank is the one that replies to vLLM, only vLLM's own timeout
    would end the wait, without naming the rank.

    All ranks of an engine get the same calls. A call that this rank got after another one had
    stopped therefore waits for that rank; so may a call from the last second before the stop was
    noticed. A stopped rank that blocks no call is ignored.

    now:     the stopped ranks
    calls:   number of calls that this rank has begun
    is_busy: True while it is in a call
    on_late: called in this thread with a fault that names the rank and the time waited for it
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
        """Checks once. at_s: the time by a monotonic clock"""
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
