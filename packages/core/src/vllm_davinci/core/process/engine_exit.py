"""Ends the processes that vLLM starts for an engine: quickly, completely and silently."""

import atexit
import gc
import multiprocessing
import signal
import sys
import threading

import tqdm

# Its C++ objects are in cycles. If the collector has not freed them by the end, the library prints
# a list of them.
LISTS_WHAT_IS_LEFT = "triton._C.libtriton"
# vLLM's names of the processes that it starts with multiprocessing.
ENGINE_PROCESSES = ("EngineCore", "VllmWorker")
_THREADS_LOCK = type(threading.RLock())


def settle_heap_at_exit() -> None:
    """Configures the garbage collector for this process's end. Idempotent.

    vLLM excludes the heap of servers and workers from collection (`gc.freeze`). The interpreter's
    final collection takes seconds over everything that vLLM imports, and in an engine's own
    processes it is
    useless: their memory is freed with them.
    """
    atexit.unregister(_settle_heap)
    atexit.register(_settle_heap)


def _settle_heap() -> None:
    if LISTS_WHAT_IS_LEFT in sys.modules:
        gc.unfreeze()
    elif is_of_engine():
        gc.freeze()


def finish_teardown() -> None:
    """Makes an engine's own process ignore SIGTERM from here on, because it is ending normally.

    Ctrl-C reaches both a server and its engine. Both begin to end, and the server also sends the
    engine SIGTERM, for which vLLM's engine has restored the default action by then. Slow processes
    are still
    killed: SIGKILL cannot be ignored.
    """
    if is_of_engine() and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


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
