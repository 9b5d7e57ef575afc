"""Ends the processes that vLLM starts for an engine: quickly, completely and silently."""

import atexit
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing import util
from types import TracebackType

import tqdm

# Library with C++ objects in reference cycles. At exit it prints those that are not freed.
LISTS_WHAT_IS_LEFT = "triton._C.libtriton"
# vLLM's names of the processes that it starts with multiprocessing.
WORKER = "VllmWorker"
ENGINE_PROCESSES = ("EngineCore", WORKER)
# multiprocessing calls this finalizer last.
AFTER_ALL_OTHERS = -1000
_THREADS_LOCK = type(threading.RLock())
ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def leave_at_exit() -> None:
    """Makes this process skip the interpreter's final garbage collections, if possible. Idempotent.

    They take 3 s of processor time in each engine process, and C++ threads that run meanwhile may
    abort it. Forked processes skip them anyway. A program's own process needs them, except after
    Ctrl-C.
    """
    if is_of_engine():
        util.Finalize(None, _leave_engine, exitpriority=AFTER_ALL_OTHERS)
        return
    atexit.unregister(_unfreeze_heap)
    atexit.register(_unfreeze_heap)
    if getattr(sys.excepthook, "func", None) is not _leave_interrupted:
        sys.excepthook = partial(_leave_interrupted, sys.excepthook)


def _leave_engine() -> None:
    """Ends the process with the current SystemExit's status. Python handles other errors."""
    error = sys.exc_info()[1] or SystemExit(0)
    if isinstance(error, SystemExit) and isinstance(error.code, int | None):
        leave(error.code or 0)


def _leave_interrupted(
    before: ExceptHook, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Ends a program by SIGINT after an uncaught KeyboardInterrupt, as Python does."""
    before(kind, error, trace)
    goes_on = sys.flags.interactive or sys.flags.inspect or hasattr(sys, "ps1")  # a prompt follows
    if issubclass(kind, KeyboardInterrupt) and not goes_on:
        _finish()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


def leave(status: int) -> None:
    """Ends this process like the interpreter, exit handlers included, but keeps its heap."""
    _finish()
    ctypes.CDLL(None).exit(status)


def leave_after_exit_handlers() -> None:
    """Exit handler of a signalled server: calls the other handlers, then exits. Register it last.

    Skips the final garbage collections, in which no time limit could end the server. The status is
    1 if Python has printed an exception, else 0.
    """
    atexit.unregister(leave_after_exit_handlers)
    leave(int(hasattr(sys, "last_type")))


def _finish() -> None:
    """Waits for threads, calls exit handlers and flushes output, as at interpreter exit."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()


def _unfreeze_heap() -> None:
    """Lets the final collection free what vLLM excluded from collection (`gc.freeze`)."""
    if LISTS_WHAT_IS_LEFT in sys.modules:
        gc.unfreeze()


def leave_groups_at_exit() -> None:
    """Makes the user's own process, if it has an engine inside, leave its groups. Idempotent.

    Otherwise torch_npu destroys all groups at exit, and vLLM's engine, which ends later, fails with
    "Invalid process group specified".
    """
    if not is_of_engine():
        atexit.unregister(_leave_groups)
        atexit.register(_leave_groups)


def _leave_groups() -> None:
    from vllm.distributed import parallel_state  # this module is also used without vLLM

    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def finish_teardown() -> None:
    """Makes an engine's own process ignore SIGTERM from here on, because it is ending normally.

    Ctrl-C reaches both a server and its engine. Both begin to end, and the server also sends the
    engine SIGTERM, for which vLLM's engine has restored the default action by then. Slow processes
    are still killed: SIGKILL cannot be ignored.
    """
    if is_of_engine() and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def leave_interrupts_to_engine() -> None:
    """Makes a worker's process ignore Ctrl-C, which a terminal also sends to its engine.

    vLLM's workers would end at once, even in a step. Their engine reports that as an error, with a
    traceback, and open requests cannot finish (--shutdown-timeout).
    """
    if multiprocessing.current_process().name.startswith(WORKER):
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def keep_no_semaphore() -> None:
    """Makes progress bars of an engine's process use a thread lock. Idempotent.

    tqdm's own lock has a named semaphore, which a signal leaves behind: the parent process then
    warns of a leak when the server ends.
    """
    if is_of_engine() and not isinstance(getattr(tqdm.tqdm, "_lock", None), _THREADS_LOCK):
        tqdm.tqdm.set_lock(threading.RLock())


def is_of_engine() -> bool:
    """True if vLLM started this process for an engine; False for the user's own process."""
    return multiprocessing.current_process().name.startswith(ENGINE_PROCESSES)
