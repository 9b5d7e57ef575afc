"""Ctrl-C while vLLM waits for its engine to start.

vLLM opens the socket of that wait in `zmq_socket_ctx`, which swallows KeyboardInterrupt; the
client goes on to wait, up to VLLM_ENGINE_READY_TIMEOUT_S (600 s), for an engine that the same
Ctrl-C has ended. Until an interrupt leaves that function by itself, the handler below repeats it.
"""

import multiprocessing
import signal
import sys
import threading
import time
from types import FrameType

WAIT_THAT_SWALLOWS = "wait_for_engine_startup"
CLIENT = "vllm/v1/engine/core_client.py"
# How long the repetition looks for the second wait, and how often.
LIMIT_S = 10.0
INTERVAL_S = 0.2


def let_interrupts_end_the_start() -> None:
    """Takes over SIGINT where Python's own handler is in place. Idempotent.

    Everywhere but in the wait above the handler does what Python's does. Does nothing
    outside the main thread of the process that the user started, or where someone else handles
    SIGINT.
    """
    if (
        multiprocessing.parent_process() is None
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):
        signal.signal(signal.SIGINT, interrupt)


def interrupt(signal_number: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt, and sees to it that the start ends when vLLM swallows it."""
    if any(name == WAIT_THAT_SWALLOWS for _, name in callers(frame)):
        threading.Thread(target=repeat, name="repeat_interrupt", daemon=True).start()
    raise KeyboardInterrupt


def repeat() -> None:
    """Interrupts the main thread once more when it has got to the client's second wait."""
    main = threading.main_thread().ident
    assert main is not None
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        time.sleep(INTERVAL_S)
        if waits_for_ready_engine(callers(sys._current_frames().get(main))):
            # To the thread, whose wait in C ends with it.
            signal.pthread_kill(main, signal.SIGINT)
            return


def waits_for_ready_engine(stack: list[tuple[str, str]]) -> bool:
    """Whether a stack, innermost first, is that of the client's second wait."""
    if not stack or stack[0][1] != "poll":
        return False
    outside = [caller for caller in stack if caller[1] != "poll"]
    return bool(outside) and outside[0][0].endswith(CLIENT) and outside[0][1] == "__init__"


def callers(frame: FrameType | None) -> list[tuple[str, str]]:
    """File and function of a frame and of those that called it, innermost first."""
    found = []
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_code.co_name))
        frame = frame.f_back
    return found
