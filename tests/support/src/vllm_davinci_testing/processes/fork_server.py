"""Forks processes from one that has already imported everything.

Imports take most of the time of a small program on the virtual NPU, a rank or an engine; the fork
server has done them. Device settings are read at first use, and the server never uses a device, so
each child has its own device, environment and end.
"""

import faulthandler
import logging
import multiprocessing
import multiprocessing.context
import os
import socket
import sys
import threading
import warnings
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.connection import Connection, arbitrary_address
from typing import Any

# The server's import of this module executes it once; children find the modules loaded.
PRELOADED = "vllm_davinci_testing.processes.preloaded"
# Python ignores these warnings. pytest shows them and turns others into errors; engines must do
# neither.
IGNORED = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)
_warning_filters: list[Any] = []


def fork_context() -> multiprocessing.context.ForkServerContext:
    """Starts processes as children of the fork server; each pytest process has a server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])
    return context


def process_id() -> int | None:
    """Returns the fork server's process id, if it has been started."""
    return forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]


def import_for_forks(module: str) -> None:
    """Imports the modules that the server's children share, with the server's warning filters."""
    with warnings.catch_warnings():
        warnings.resetwarnings()
        for category in IGNORED:
            warnings.simplefilter("ignore", category)
        import_module(module)
        _warning_filters[:] = warnings.filters


def be_served_by_a_fork(*closed: Connection) -> None:
    """Makes a fork of this process the fork server, after `import_for_forks`.

    multiprocessing would start an interpreter, whose imports take 20 s of processor time. Sets the
    same attributes as multiprocessing's `ForkServer.ensure_running`.

    closed: connections of this process that the server closes
    """
    server = forkserver._forkserver  # type: ignore[attr-defined]
    with socket.socket(socket.AF_UNIX) as listener:
        address = arbitrary_address("AF_UNIX")
        listener.bind(address)
        os.chmod(address, 0o600)
        listener.listen()
        alive, held_open = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(held_open)
            for connection in closed:
                connection.close()
            _serve(listener.detach(), alive)
    os.close(alive)
    server._forkserver_address = address
    server._forkserver_alive_fd = held_open
    server._forkserver_pid = pid


def _serve(listener: int, alive: int) -> None:
    """Forks processes until the other end of `alive` is closed. Does not return."""
    # pytest collects warnings, logs and thread errors; engines write theirs to their logs.
    faulthandler.disable()
    warnings.resetwarnings()
    warnings.filters[:] = _warning_filters
    threading.excepthook = threading.__excepthook__
    sys.unraisablehook = sys.__unraisablehook__
    logging.getLogger().handlers.clear()
    try:
        forkserver.main(listener, alive, [])
    finally:
        os._exit(0)
