"""Ends an engine whose program has gone without a word: killed, aborted, out of memory.

vLLM's workers notice that their engine's process has ended. The engine itself does not notice the
end of the server or program that has started it, and would keep its devices.
"""

import multiprocessing
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

from vllm_davinci.core.distributed.fault_channel import status_of
from vllm_davinci.core.log import init_logger

logger = init_logger(__name__)

ENGINE = "EngineCore"
LOOKS_EVERY_S = 1.0
# How long the engine has to end in order.
ENDS_WITHIN_S = 10.0


def end_with_program() -> None:
    """Starts to look after the program of this worker's engine, from a thread of its own.

    Does nothing where the engine has no process beside the program's.
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
    if parent is None:  # it has ended, which vLLM's workers notice
        return
    logger.error(
        "The program of this engine (pid %d) has ended without a word, so the engine (pid %d) ends "
        "too. The program's own output, or the kernel's log, says why.",
        program,
        engine,
    )
    with suppress(ProcessLookupError):
        os.kill(engine, signal.SIGTERM)
        time.sleep(ENDS_WITHIN_S)
        os.kill(engine, signal.SIGKILL)


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
