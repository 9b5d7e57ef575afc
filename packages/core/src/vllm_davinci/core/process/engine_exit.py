"""How the processes that vLLM starts for an engine end: quickly, whole, and without noise."""

import atexit
import gc
import multiprocessing
import signal
import sys
import threading

import tqdm

# Its C++ objects are in cycles. Where the collector has not taken them by the end, the library
# prints a list of them.
LISTS_WHAT_IS_LEFT = "triton._C.libtriton"
# How vLLM names the processes that it starts with multiprocessing.
ENGINE_PROCESSES = ("EngineCore", "VllmWorker")
_THREADS_LOCK = type(threading.RLock())


def settle_heap_at_exit() -> None:
    """Chooses what the garbage collector does at this process's end. Idempotent.

    vLLM excludes the heap of servers and workers from collection (`gc.freeze`). The interpreter
    collects once more when it ends, which takes seconds over all that vLLM imports. In an engine's
    own processes there is nothing to gain from it: their memory goes with them.
    """
    atexit.unregister(_settle_heap)
    atexit.register(_settle_heap)


def _settle_heap() -> None:
    if LISTS_WHAT_IS_LEFT in sys.modules:
        gc.unfreeze()
    elif is_of_engine():
        gc.freeze()


def finish_teardown() -> None:
    """From here on SIGTERM does not end an engine's own process: it is ending in order.

    Ctrl-C reaches a server and its engine. Each begins to end, and the server sends the engine
    SIGTERM on top of it, for which vLLM's engine has put the default action back by then. What
    takes too long is still killed: SIGKILL cannot be ignored.
    """
    if is_of_engine() and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def keep_no_semaphore() -> None:
    """Progress bars of an engine's own process take turns by a lock of its threads. Idempotent.

    tqdm's own lock has a named semaphore, which stays behind where a signal ends the process: its
    parent then warns of a leak when the server ends.
    """
    if is_of_engine() and not isinstance(getattr(tqdm.tqdm, "_lock", None), _THREADS_LOCK):
        tqdm.tqdm.set_lock(threading.RLock())


def is_of_engine() -> bool:
    """Whether this process is one that vLLM has started for an engine, not the user's own."""
    return multiprocessing.current_process().name.startswith(ENGINE_PROCESSES)
