"""With which status a server leaves."""

import atexit
import logging
import os
import sys
from functools import cache

from vllm_davinci.core.process.waiting_callers import tell_waiting_callers

# Imported by vLLM's servers and by nothing else.
SERVER_MODULE = "vllm.entrypoints.launchers.launcher"
ENGINE_CLIENT = "vllm.v1.engine.core_client"
OUTPUT_HANDLER = "vllm.v1.engine.async_llm"
# Which has the engines of a host without a server (--headless), and waits for their end.
HEADLESS = "vllm.entrypoints.cli.serve"
# Ctrl-C reaches the engine too, which may end, and be missed, before the server has noticed.
SIGNAL_DELAY_S = 5


def fail_when_engine_dies() -> None:
    """Makes a server whose engine died end with status 1. Idempotent.

    vLLM's server answers every request with an error then, shuts down in order, and exits with
    status 0, which tells a supervisor not to start it again.
    """
    death = _engine_death()
    logging.getLogger("vllm").addHandler(death)
    logging.getLogger(OUTPUT_HANDLER).addFilter(death.is_news)
    for name in (SERVER_MODULE, ENGINE_CLIENT, HEADLESS):
        logger = logging.getLogger(name)
        if not logger.isEnabledFor(logging.INFO):  # the handler must see it; others filter it
            logger.setLevel(logging.INFO)


class EngineDeath(logging.Handler):
    """Remembers that vLLM reported the death of its engine, and that it was told to end.

    vLLM has no callback for either event. The engine's client and the server report them in words,
    and who waits for the engine by the exception.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._died_at: float | None = None
        self._told_at: float | None = None
        self._is_headless = False
        atexit.register(self.leave)

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == SERVER_MODULE:
            if self._told_at is None and "shutdown triggered" in record.getMessage():
                self._told_at = record.created
            return
        if record.name == HEADLESS:
            self._hear_of_headless(record)
            return
        of_client = record.getMessage() if record.name == ENGINE_CLIENT else ""
        if "[shutdown]" in of_client:  # its engine's death is reported for the first one alone
            tell_waiting_callers()
        if self._died_at is None and (
            _is_engine_dead_error(record) or "engine core exited unexpectedly" in of_client
        ):
            self._died_at = record.created

    def _hear_of_headless(self, record: logging.LogRecord) -> None:
        """Engines without a server end when one of them has died, or after a signal, in words."""
        words = record.getMessage()
        self._is_headless |= words.startswith("Launching")
        if words.startswith("Waiting up to"):
            self._told_at = record.created
        elif words == "Shutting down." and self._told_at is None:
            self._died_at = record.created

    def is_news(self, record: logging.LogRecord) -> bool:
        """A filter: once the server was told to end, the engine's death is no error.

        vLLM closes the engine's output before it ends the task that waits for it, which now and
        then has the time to report that with a traceback.
        """
        return self._told_at is None or not _is_engine_dead_error(record)

    @property
    def is_failure(self) -> bool:
        """Whether the engine died although nobody had told the server to end."""
        if self._died_at is None:
            return False
        return self._told_at is None or self._told_at > self._died_at + SIGNAL_DELAY_S

    def leave(self) -> None:
        """Ends the process when it is such a server. Nothing else can set the status by now."""
        if self.is_failure and (self._is_headless or SERVER_MODULE in sys.modules):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


@cache
def _engine_death() -> EngineDeath:
    """The record of this process, which leaves once."""
    return EngineDeath()


def _is_engine_dead_error(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return type(error).__name__ == "EngineDeadError"
