"""Loggers that print, and lines of vLLM's that mean nothing on this platform."""

import atexit
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.logger import init_logger as _init_vllm_logger  # noqa: TID251  the one place

# Logger -> beginnings of warnings, as they stand in vLLM's source. Each would come from every
# process of an engine, about a choice that this platform makes and no user can.
WITHOUT_MEANING_HERE: dict[str, tuple[str, ...]] = {
    "vllm.config.vllm": (
        # Nothing is compiled, whatever the settings.
        "Inductor compilation was disabled by user settings",
        # The V1 runner is the one that is served (core.model_runner); V2 is refused.
        "Model Runner V2 requires Triton",
    ),
    # Of our own scheduler (core.scheduler), which is asynchronous where vLLM's is.
    "vllm.config.scheduler": ("Using custom scheduler class %s",),
}

# Logger -> beginning of a warning of a program that ends with its engine, and for how many seconds
# after the program's end has begun it means nothing. Two threads of vLLM wait for the engine's
# process, and one of them may miss its end, which the other takes. Before vLLM kills, it waits
# longer than END_S.
END_S = 4.0
NOT_AT_THE_END: dict[str, tuple[str, float]] = {
    "vllm.v1.engine.core_client": (
        "[shutdown] MPClient: engine core exited unexpectedly",
        float("inf"),
    ),
    "vllm.v1.utils": ("[shutdown] Process manager: force killing remaining process", END_S),
}
_end_began_at: float | None = None


def init_logger(name: str) -> Any:
    """A logger with vLLM's level, format and `*_once` methods.

    vLLM configures the logger `vllm` and those below it, and no others.

    name: the module's `__name__`
    """
    return _init_vllm_logger(f"vllm.{name}")


# How often work that takes long says that it goes on.
SAYS_EVERY_S = 10.0


@contextmanager
def progress(logger: Any, work: str, is_said: bool = True) -> Iterator[None]:
    """Says that this work begins, and now and then that it goes on.

    work:    begins a sentence, as in "The profile run"
    is_said: False for the other ranks of an engine
    """
    if not is_said:
        yield
        return
    begun_s = time.monotonic()
    is_done = threading.Event()

    def say() -> None:
        while not is_done.wait(SAYS_EVERY_S):
            logger.info("%s goes on: %.0f s so far.", work, time.monotonic() - begun_s)

    logger.info("%s begins.", work)
    threading.Thread(target=say, name="progress", daemon=True).start()
    try:
        yield
    finally:
        is_done.set()


def leave_out_what_means_nothing() -> None:
    """Keeps those warnings out of this process's log. Idempotent."""
    for name in WITHOUT_MEANING_HERE:
        logging.getLogger(name).addFilter(_means_something)
    for name in NOT_AT_THE_END:
        logging.getLogger(name).addFilter(_is_of_running_program)
    atexit.unregister(_begin_end)
    atexit.register(_begin_end)  # runs before what vLLM has registered, which ends engines


def _means_something(record: logging.LogRecord) -> bool:
    if not str(record.msg).startswith(WITHOUT_MEANING_HERE[record.name]):
        return True
    is_of_users = isinstance(record.args, tuple) and "vllm_davinci" not in str(record.args[:1])
    return is_of_users and bool(record.args)


def _begin_end() -> None:
    global _end_began_at
    _end_began_at = time.time()


def _is_of_running_program(record: logging.LogRecord) -> bool:
    beginning, seconds = NOT_AT_THE_END[record.name]
    if not str(record.msg).startswith(beginning):
        return True
    return _end_began_at is None or record.created > _end_began_at + seconds
