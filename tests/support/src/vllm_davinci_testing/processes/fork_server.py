"""Forks processes from one that has already imported everything.

Imports take most of the time of a small program on the virtual NPU, a rank or an engine. The fork
server has done them; its children still have their own device, environment and end, because the
server never uses a device, whose settings are read at the first use.
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

# Executed once in the server, by its import; its children find the modules loaded.
PRELOADED = "vllm_davinci_testing.processes.preloaded"
# Warnings that Python ignores. pytest shows them and turns others into errors; engines must do
# neither.
IGNORED = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)
_warning_filters: list[Any] = []


def fork_context() -> multiprocessing.context.ForkServerContext:
    """Starts processes as children of the fork server; each pytest process has one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])
    return context


def process_id() -> int | None:
    """Returns the fork server's process id, if it has been started."""
    return forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]


def import_for_forks(module: str) -> None:
    """Imports the modules that the server's children share, with its warning filters."""
    with warnings.catch_warnings():
        warnings.resetwarnings()
        for category in IGNORED:
            warnings.simplefilter("ignore", category)
        import_module(module)
        _warning_filters[:] = warnings.filters


def be_served_by_a_fork(*closed: Connection) -> None:
    """Makes a fork of this process its fork server, after `import_for_forks`.

    multiprocessing starts an interpreter instead, whose imports take 20 s of processor time. What
    is set here is what its `ForkServer.ensure_running` sets.

    closed: connections of this process that the server does not keep open
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
    # pytest collects warnings, logs and thread errors; engines' are in their logs.
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
