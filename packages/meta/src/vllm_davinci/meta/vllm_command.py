"""Prepares a process that is a `vllm` command before it imports anything.

The import of vLLM takes seconds, on a busy or cold machine minutes, in which the command says
nothing, and a Ctrl-C is a traceback of whatever is being imported.
"""

from __future__ import annotations

import os
import signal
import sys

from vllm_davinci.meta import device_library

# Commands of vLLM that start an engine, and those that only talk to a server.
ENGINES = ("serve", "run-batch", "bench latency", "bench throughput", "bench startup")
CLIENTS = ("chat", "complete", "bench serve")


def prepare(arguments: list[str]) -> None:
    """Says that the import goes on, lets Ctrl-C end it, and spares a client the device.

    arguments: of the command, without its name
    """
    words = " ".join(word for word in arguments[:2] if not word.startswith("-"))
    if words.startswith(ENGINES):
        print(
            "vllm-davinci: vLLM and torch are imported, which takes some 10 s, and up to 2 minutes "
            "where files are read for the first time.",
            file=sys.stderr,
            flush=True,
        )
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # until core takes over
    elif words.startswith(CLIENTS) and device_library.loader_error() is not None:
        os.environ[device_library.AUTOLOAD] = "0"  # torch alone
