"""With which status a server leaves."""

import atexit
import logging
import os
import sys

# Imported by vLLM's servers and by nothing else.
SERVER_MODULE = "vllm.entrypoints.launchers.launcher"
ENGINE_CLIENT = "vllm.v1.engine.core_client"


def fail_when_engine_dies() -> None:
    """Makes a server whose engine died end with status 1. Idempotent.

    vLLM's server answers every request with an error then, shuts down in order, and exits with
    status 0, which tells a supervisor not to start it again.
    """
    logger = logging.getLogger("vllm")
    if not any(isinstance(handler, EngineDeath) for handler in logger.handlers):
        logger.addHandler(EngineDeath())


class EngineDeath(logging.Handler):
    """Remembers that vLLM reported the death of its engine.

    vLLM has no callback for the event. The engine's client reports it in words, and who waits for
    the engine by the exception.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.is_reported = False
        atexit.register(self.leave)

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.is_reported |= type(error).__name__ == "EngineDeadError" or (
            record.name == ENGINE_CLIENT
            and "engine core exited unexpectedly" in record.getMessage()
        )

    def leave(self) -> None:
        """Ends the process when it is such a server. Nothing else can set the status by now."""
        if self.is_reported and SERVER_MODULE in sys.modules:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
