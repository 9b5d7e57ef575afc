"""Prepares a `vllm` command's process before its imports.

Importing vLLM takes seconds, minutes on a busy or cold machine. Meanwhile the command would print
nothing, and Ctrl-C would print a traceback of some import.
"""

import atexit
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from vllm_davinci.meta import device_library
from vllm_davinci.meta.core_access import IMPORTS
from vllm_davinci.meta.given_arguments import missing_directory

# vLLM's commands that start an engine, and those that only talk to a server.
ENGINES = ("serve", "run-batch", "bench latency", "bench throughput", "bench startup")
CLIENTS = ("chat", "complete", "bench serve")
NO_HOST = "Cannot connect to host"  # aiohttp's message, which vLLM's errors contain
ExceptHook = Callable[[type[BaseException], Any, Any], object]


def prepare(arguments: list[str]) -> None:
    """Announces the import, lets Ctrl-C end it, and keeps clients from loading the device.

    Ends the process if the model is a path that does not exist.

    arguments: the command's arguments, without its name
    """
    words = " ".join(word for word in arguments[:2] if not word.startswith("-"))
    if words.startswith(ENGINES):
        if (problem := missing_directory(_model(arguments))) is not None:
            _refuse(f"vllm {words if words.startswith('bench') else arguments[0]}", problem)
        print(IMPORTS, file=sys.stderr, flush=True)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # until core takes over
    elif words.startswith(CLIENTS):
        sys.excepthook = partial(_say_unreachable, f"vllm {words}", sys.excepthook)
        if device_library.loader_error() is not None:
            os.environ[device_library.AUTOLOAD] = "0"  # torch without its device
            # The heap is frozen by `bench serve`; Triton would then report its objects as leaks.
            atexit.register(gc.unfreeze)


def _model(arguments: list[str]) -> str:
    """The model given by `serve MODEL` or `--model MODEL`; empty if neither is given."""
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        option, _, value = word.partition("=")
        if option == "--model" or word == "serve":
            return value or ("" if following.startswith("-") else following)
    return ""


def _say_unreachable(
    command: str, before: ExceptHook, kind: type[BaseException], error: Any, trace: Any
) -> None:
    """Prints one line, not a traceback, if no server answers a client."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConnectionRefusedError | socket.gaierror) or NO_HOST in str(cause):
            line = str(cause).strip().splitlines()[-1]
            words = f"no server answers ({line[max(0, line.find(NO_HOST)) :]})"
            advice = "Start one with `vllm serve`, or name its --host and --port, or its URL."
            print(f"{command}: error: {words}. {advice}", file=sys.stderr)
            return
        cause = cause.__cause__ or cause.__context__
    before(kind, error, trace)


def _refuse(command: str, problem: str) -> NoReturn:
    """Ends the process with a message. It is still importing its site, where an exception is
    fatal.
    """
    print(f"{command}: error: {problem}", file=sys.stderr, flush=True)
    os._exit(1)
