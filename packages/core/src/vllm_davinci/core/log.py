"""Loggers that print, and filters for vLLM's messages that are irrelevant on this platform."""

import atexit
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.logger import init_logger as _init_vllm_logger  # noqa: TID251  the one place

# Logger -> prefixes of warnings in vLLM's source. Every process of an engine would log them, about
# choices that this platform makes and users cannot change.
WITHOUT_MEANING_HERE: dict[str, tuple[str, ...]] = {
    "vllm.config.vllm": (
        # Nothing is compiled, whatever the settings.
        "Inductor compilation was disabled by user settings",
    ),
    # The V2 runner's tables are copied from pinned memory (core.runner.buffers).
    "vllm.v1.worker.gpu.buffer_utils": ("Pinned memory is not available on this platform",),
    # Concerns sharding of a product that is not used here.
    "vllm.models.kimi_k3.amd.latent_moe_runner": ("K3 latent-MoE tail is not shardable",),
    # Concerns our own scheduler (core.scheduler), which is asynchronous if vLLM's is.
    "vllm.config.scheduler": ("Using custom scheduler class %s",),
}

# Logger -> prefix of a warning, and for how many seconds after a shutdown begins it is irrelevant.
# Two threads of vLLM wait for the engine's process, and one may miss its end because the other
# reaps it. vLLM waits longer than END_S before it kills.
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

    vLLM configures only the logger `vllm` and its descendants.

    name: the module's `__name__`
    """
    return _init_vllm_logger(f"vllm.{name}")


# Interval of progress messages of long work.
SAYS_EVERY_S = 10.0


@contextmanager
def progress(logger: Any, work: str, is_said: bool = True) -> Iterator[None]:
    """Logs that this work begins, and at intervals that it continues.

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
            logger.info("%s continues: %.0f s so far.", work, time.monotonic() - begun_s)

    logger.info("%s begins.", work)
    threading.Thread(target=say, name="progress", daemon=True).start()
    try:
        yield
    finally:
        is_done.set()


def leave_out_what_means_nothing() -> None:
    """Filters those warnings from this process's log. Idempotent."""
    for name in WITHOUT_MEANING_HERE:
        logging.getLogger(name).addFilter(_means_something)
    for name in NOT_AT_THE_END:
        logging.getLogger(name).addFilter(_is_of_running_program)
    atexit.unregister(_begin_end)
    atexit.register(_begin_end)  # runs before vLLM's registered functions, which end engines


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
