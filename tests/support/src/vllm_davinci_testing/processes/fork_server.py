"""Processes forked from one that has imported everything already.

What a small program on the virtual NPU, a rank or an engine needs most of the time for is imports.
A fork server has them done, and its children still have a device, an environment and an end of
their own: the server itself never touches a device, whose settings are read at its first use.
"""

from __future__ import annotations

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

# Executed once in the server, by its import; the server's children find the modules there.
PRELOADED = "vllm_davinci_testing.processes.preloaded"
# What Python ignores; pytest shows it, and makes errors of others, which engines must not.
IGNORED = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)
_warning_filters: list[Any] = []


def fork_context() -> multiprocessing.context.ForkServerContext:
    """Makes processes as children of the fork server, of which each pytest process has one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])
    return context


def process_id() -> int | None:
    """The fork server's, if it has been started."""
    return forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]


def import_for_forks(module: str) -> None:
    """Imports what the server's children have in common, with the filters that it sets."""
    with warnings.catch_warnings():
        warnings.resetwarnings()
        for category in IGNORED:
            warnings.simplefilter("ignore", category)
        import_module(module)
        _warning_filters[:] = warnings.filters


def be_served_by_a_fork(*closed: Connection) -> None:
    """Makes a fork of this process, after `import_for_forks`, its fork server.

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
    """Forks processes until nothing holds the other end of `alive`. Does not return."""
    # pytest collects warnings, logs and errors of threads; those of engines are in their logs.
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
