"""Ends processes after a signal: within a limit, completely, silently, and with the right status.

Covers the user's own process and API servers; for an engine's processes see process.engine_exit.
The order of events and the limits are in docs/guides/ending.md.
"""

import atexit
import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil

from vllm_davinci.core.process.engine_exit import ENGINE_PROCESSES, leave_after_exit_handlers

# --- a server and a program: signals --------------------------------------------------------

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Time for everything to end after a signal, in addition to --shutdown-timeout. vLLM's own limits
# are shorter: 5 s for a program's engine, which is then killed.
ENDS_WITHIN_S = 10.0
# Time for a server's several API servers to answer before vLLM kills them.
ANSWERS_WITHIN_S = 2.0
# A Ctrl-C reaches some processes twice, from the terminal and from their parent.
REPEATED_AFTER_S = 0.1
# Time for killed processes to be gone.
KILLED_WITHIN_S = 2.0
# The process that frees shared memory after all other processes have ended.
RESOURCE_TRACKER = "multiprocessing.resource_tracker"
# vLLM's modules whose SIGTERM handlers show which server starts in this process.
ONE_SERVER = "vllm.entrypoints.launchers.api_server.entry"
SEVERAL_SERVERS = HEADLESS = "vllm.entrypoints.cli.serve"
API_SERVER = "ApiServer"


def take_over_signals(drains_s: float) -> None:
    """Handles SIGINT and SIGTERM of a process that starts servers or engines. Idempotent.

    Does nothing outside the main thread, in an engine's own processes, or if a program handles
    SIGINT itself.

    drains_s: time for open requests to finish (--shutdown-timeout)
    """
    if threading.current_thread() is not threading.main_thread():
        return
    owner = getattr(signal.getsignal(signal.SIGTERM), "__module__", None)
    if owner == ONE_SERVER:
        SignalledEnd(drains_s, None)
    elif owner == SEVERAL_SERVERS:
        SignalledEnd(drains_s, _end_api_servers if drains_s == 0 else _begin_nothing)
    elif multiprocessing.current_process().name.startswith(API_SERVER):
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until it serves, Ctrl-C ends it at once
    elif multiprocessing.parent_process() is None:
        atexit.unregister(_end_engines)
        atexit.register(_end_engines)
        # SIG_DFL is the handler of a `vllm` command that has imported vLLM (meta.vllm_command).
        if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_DFL):
            signal.signal(signal.SIGINT, interrupt)


class SignalledEnd:
    """Wraps this process's handlers of SIGINT and SIGTERM.

    The first signal begins a shutdown with a time limit. A second Ctrl-C ends everything at once.

    begin: begins the shutdown; None while the server starts: everything ends at once
    """

    def __init__(self, drains_s: float, begin: Callable[[], None] | None) -> None:
        self._limit_s, self._begin = drains_s + ENDS_WITHIN_S, begin
        self._began_s: float | None = None
        self._remains: Remains | None = None
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        for number in SIGNALS:
            signal.signal(number, self._handle)
            signal.siginterrupt(number, False)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self._began_s is None:
            self._began_s = now_s
            _engine_death().hear_signal()
            if self._begin is None:
                self._leave(128 + number, "The server was still starting, and ends.")
            self._remains = Remains(psutil.Process().children())
            atexit.register(leave_after_exit_handlers)
            _after(self._limit_s, self._leave_late)
            self._begin()
        elif number == signal.SIGINT and now_s - self._began_s >= REPEATED_AFTER_S:
            self._leave(128 + number, "Ctrl-C again: the server ends at once.")
        if callable(before := self._before[signal.Signals(number)]):
            before(number, frame)

    def _leave_late(self) -> None:
        words = f"The server has not ended within {self._limit_s:.0f} s of the signal, and is ended"
        self._leave(0, f"{words} with all of its processes.")

    def _leave(self, status: int, words: str) -> NoReturn:
        # The signal may have interrupted code that holds the log's own locks.
        os.write(2, f"vllm-davinci: {words}\n".encode())
        (self._remains or Remains(psutil.Process().children())).end()
        os._exit(status)


class Remains:
    """Leftovers of killed processes and their descendants.

    multiprocessing's tracker outlives them and frees shared memory.
    """

    def __init__(self, roots: Iterable[psutil.Process]) -> None:
        self.processes: list[psutil.Process] = []
        for root in roots:
            with suppress(psutil.NoSuchProcess):
                if RESOURCE_TRACKER not in " ".join(root.cmdline()):
                    self.processes += [root, *root.children(recursive=True)]
        self._sockets: set[Path] = set()
        for process in (psutil.Process(), *self.processes):
            with suppress(psutil.Error):
                names = [str(each.laddr) for each in process.net_connections("unix")]
                self._sockets |= {Path(name) for name in names if name.startswith("/")}
        self._owner = os.getpid()
        atexit.register(self.remove_sockets)

    def end(self) -> None:
        """Kills the processes that have not ended, and removes their socket files."""
        for process in self.processes:
            with suppress(psutil.NoSuchProcess):
                self.processes += [
                    each for each in process.children(recursive=True) if each not in self.processes
                ]
                process.kill()
        psutil.wait_procs(self.processes, KILLED_WITHIN_S)
        self.remove_sockets()

    def remove_sockets(self) -> None:
        """Removes socket files; open connections stay. Does nothing in a fork of this process."""
        for file in self._sockets if os.getpid() == self._owner else ():
            if file.is_socket():
                file.unlink(missing_ok=True)


def _end_api_servers() -> None:
    """Waits for this server's API servers to answer open requests; vLLM would kill them at once."""
    servers = [
        each for each in multiprocessing.active_children() if each.name.startswith(API_SERVER)
    ]
    for server in servers:
        server.terminate()
    end_s = time.monotonic() + ANSWERS_WITHIN_S
    for server in servers:
        server.join(max(0.0, end_s - time.monotonic()))


def _begin_nothing() -> None:
    """Does nothing: vLLM gives servers and engines the time of --shutdown-timeout."""


def _end_engines() -> None:
    """Ends the program's engines with a limit; at once after another Ctrl-C."""
    children = multiprocessing.active_children()
    engines = [each.pid for each in children if each.name.startswith(ENGINE_PROCESSES)]
    if not engines:
        return
    remains = Remains(psutil.Process(pid) for pid in engines if psutil.pid_exists(pid or 0))
    remains.remove_sockets()
    _after(ENDS_WITHIN_S, remains.end)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, lambda number, frame: remains.end())


def _after(seconds: float, work: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, work)
    timer.daemon = True
    timer.start()


# --- a program: Ctrl-C while vLLM waits for its engine to start -----------------------------
#
# vLLM opens the socket of that wait in `zmq_socket_ctx`, which swallows KeyboardInterrupt; the
# client then waits, up to VLLM_ENGINE_READY_TIMEOUT_S (600 s), for an engine that the same Ctrl-C
# has ended. Until `zmq_socket_ctx` lets interrupts through, the handler below repeats them.

WAIT_THAT_SWALLOWS = "wait_for_engine_startup"
CLIENT = "vllm/v1/engine/core_client.py"
# Duration and interval of the search for the second wait.
LIMIT_S = 10.0
INTERVAL_S = 0.2


def interrupt(signal_number: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt, and makes sure that the start ends if vLLM swallows it."""
    if any(name == WAIT_THAT_SWALLOWS for _, name in callers(frame)):
        threading.Thread(target=repeat, name="repeat_interrupt", daemon=True).start()
    raise KeyboardInterrupt


def repeat() -> None:
    """Interrupts the main thread again when it has reached the client's second wait."""
    main = threading.main_thread().ident
    assert main is not None
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        time.sleep(INTERVAL_S)
        if waits_for_ready_engine(callers(sys._current_frames().get(main))):
            # Sent to the thread, so that its wait in C ends.
            signal.pthread_kill(main, signal.SIGINT)
            return


def waits_for_ready_engine(stack: list[tuple[str, str]]) -> bool:
    """True if a stack, innermost first, is in the client's second wait."""
    if not stack or stack[0][1] != "poll":
        return False
    outside = [caller for caller in stack if caller[1] != "poll"]
    return bool(outside) and outside[0][0].endswith(CLIENT) and outside[0][1] == "__init__"


def callers(frame: FrameType | None) -> list[tuple[str, str]]:
    """File and function of a frame and its callers, innermost first."""
    found = []
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_code.co_name))
        frame = frame.f_back
    return found


# --- a program: calls that wait for a dead engine -------------------------------------------


def tell_waiting_callers() -> None:
    """Raises EngineDeadError in this process's calls that wait for dead engines.

    vLLM's client of an offline engine sets a flag for later calls when the engine's process has
    ended. A call that is already waiting is woken only by the engine's last message, which a killed
    or aborted process has not sent.

    When the program ends, Python stops this thread for good and does not free the objects that it
    refers to. So it refers only to the clients.
    """
    from vllm.v1.engine.core_client import SyncMPClient  # imports this package's platform
    from vllm.v1.engine.exceptions import EngineDeadError

    for kind in (SyncMPClient, *SyncMPClient.__subclasses__()):
        # By its type: isinstance would also ask proxies, one of which may refer to a freed object.
        clients = [each for each in gc.get_referrers(kind) if type(each) is kind]
        for client in clients:
            if not client.resources.engine_dead:
                continue
            client.outputs_queue.put_nowait(EngineDeadError())
            for result in list(client.utility_results.values()):
                if not result.done():
                    result.set_exception(EngineDeadError())


# --- a server: its exit status --------------------------------------------------------------

# Imported only by vLLM's servers.
SERVER_MODULE = "vllm.entrypoints.launchers.launcher"
ENGINE_CLIENT = "vllm.v1.engine.core_client"
OUTPUT_HANDLER = "vllm.v1.engine.async_llm"
# Ctrl-C also reaches the engine, whose end may be noticed before the server handles the signal.
SIGNAL_DELAY_S = 5


def fail_when_engine_dies() -> None:
    """Makes a server whose engine died end with status 1. Idempotent.

    vLLM's server then answers every request with an error, shuts down and exits with status 0,
    which tells a supervisor not to restart it.
    """
    death = _engine_death()
    logging.getLogger("vllm").addHandler(death)
    logging.getLogger(OUTPUT_HANDLER).addFilter(death.is_news)
    for name in (SERVER_MODULE, ENGINE_CLIENT, HEADLESS):
        logger = logging.getLogger(name)
        if not logger.isEnabledFor(logging.INFO):  # EngineDeath needs them; others filter by level
            logger.setLevel(logging.INFO)


class EngineDeath(logging.Handler):
    """Records that vLLM reported the death of its engine, and that a signal told the server to end.

    vLLM has no callback for either event. The engine's client and the server only log them, and
    waiting callers get an exception.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._died_at: float | None = None
        self._told_at: float | None = None
        self._is_headless = False
        atexit.register(self.leave)

    def hear_signal(self) -> None:
        """Records that a signal told the server to end."""
        if self._told_at is None:
            self._told_at = time.time()

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == SERVER_MODULE:
            if self._told_at is None and "shutdown triggered" in record.getMessage():
                self._told_at = record.created
            return
        if record.name == HEADLESS:
            self._hear_of_headless(record)
            return
        of_client = record.getMessage() if record.name == ENGINE_CLIENT else ""
        if "[shutdown]" in of_client:  # only the first engine's death is reported
            tell_waiting_callers()
        if self._died_at is None and (
            _is_engine_dead_error(record) or "engine core exited unexpectedly" in of_client
        ):
            self._died_at = record.created

    def _hear_of_headless(self, record: logging.LogRecord) -> None:
        """Recognizes, from log text, the end of engines without a server: one died, or a signal."""
        words = record.getMessage()
        self._is_headless |= words.startswith("Launching")
        if words.startswith("Waiting up to"):
            self._told_at = record.created
        elif words == "Shutting down." and self._told_at is None:
            self._died_at = record.created

    def is_news(self, record: logging.LogRecord) -> bool:
        """Log filter: drops reports of the engine's death once the server was told to end.

        vLLM closes the engine's output before it ends the task that waits for it, which sometimes
        has time to log that with a traceback.
        """
        return self._told_at is None or not _is_engine_dead_error(record)

    @property
    def is_failure(self) -> bool:
        """True if the engine died although the server was not told to end."""
        if self._died_at is None:
            return False
        return self._told_at is None or self._told_at > self._died_at + SIGNAL_DELAY_S

    def leave(self) -> None:
        """Exit handler: ends such a server with status 1, which nothing can change later."""
        if self.is_failure and (self._is_headless or SERVER_MODULE in sys.modules):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


@cache
def _engine_death() -> EngineDeath:
    """This process's record, registered once as its exit handler."""
    return EngineDeath()


def _is_engine_dead_error(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return type(error).__name__ == "EngineDeadError"
