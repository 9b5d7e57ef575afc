"""Passes the cause of an engine's death from the failed rank to the server's clients.

vLLM tells clients only that its engine died. The rank that knows the cause writes it to a file
whose name only the server's processes know; a middleware of the server (process.middleware) adds it
to the responses.
"""

import atexit
import os
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path

from vllm_davinci.core.config.environment_variables import FAULT_REPORT


def name_file() -> None:
    """Names the file for all processes of this server, which removes it at its end."""
    if FAULT_REPORT.key not in os.environ:
        file = Path(tempfile.gettempdir(), f"vllm-davinci-fault-{secrets.token_hex(16)}")
        os.environ[FAULT_REPORT.key] = str(file)
        atexit.register(_remove, file, os.getpid())


def leave_report(cause: str) -> None:
    """Writes the cause if a server has requested it; only the first rank's report is stored."""
    if file := os.environ.get(FAULT_REPORT.key):
        with suppress(FileExistsError):
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w") as report:
                report.write(cause)


def read() -> str:
    """The cause; empty if no rank has reported one."""
    try:
        return Path(os.environ[FAULT_REPORT.key]).read_text()
    except (KeyError, FileNotFoundError):
        return ""


def _remove(file: Path, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked process
        file.unlink(missing_ok=True)
