"""Prints configuration errors of vLLM's commands in one line, with advice and no traceback.

VLLM_LOGGING_LEVEL=DEBUG shows the tracebacks.
"""

import errno
import logging
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from traceback import walk_tb
from types import TracebackType
from typing import Any

import vllm.envs as envs

from vllm_davinci.core.errors import CoreError, RankFaultError
from vllm_davinci.core.process.engine_exit import is_of_engine, leave

# The functions that vLLM runs in a command before it starts an engine (the second looks a model up
# if HF_HUB_OFFLINE is set, the third takes the port), and the logger that reports a failed start.
# In the engine's own process vLLM raises the error again, and Python prints it again.
CONFIGURES = {"create_engine_config", "from_cli_args", "create_server_socket"}
ENGINE_LOGGER = "vllm.v1.engine.core"
NOT_STARTED = "EngineCore failed to start."
ENGINE_FAILED = "Engine core initialization failed."
ENGINE_FAILED_WORDS = "The engine did not start, for the reason above."
# The report of a failed rank in an engine of several, and the worker calls that belong to a start.
WORKER_LOGGER = "vllm.v1.executor.multiproc_executor"
WORKER_FAILED = ("Worker failed with error", "WorkerProc initialization failed")
WORKER_FAILED_WORDS = "A worker did not start, for the reason above."
STARTS_WORKER = {
    *("init_device", "load_model", "determine_available_memory"),
    *("initialize_from_config", "compile_or_warm_up_model"),
}
TRACEBACK = "VLLM_LOGGING_LEVEL=DEBUG shows the traceback."


def shorten_errors_of_commands() -> None:
    """Prints configuration errors in one line each. For processes that run a vLLM command.

    Other errors keep their traceback, without the line that torch_npu adds to each, about an
    unknown exception of the application.
    """
    if not is_debugging():
        sys.excepthook = _end_command


def shorten_errors_of_engines() -> None:
    """Makes an engine that fails to start because of a setting report it in one line and end.
    Idempotent.

    A program calls it, too: vLLM does not load plugins again in an engine forked from it.
    """
    if not is_debugging():
        logging.getLogger(ENGINE_LOGGER).addFilter(_say_and_end)
        logging.getLogger(WORKER_LOGGER).addFilter(_shorten_of_worker)


def is_debugging() -> bool:
    return bool(envs.VLLM_LOGGING_LEVEL == "DEBUG")


def _end_command(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if (status := _print_error(kind, error, trace)) is not None:
        leave(status)


def _print_error(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> int | None:
    """The command's status if the error is one line; None if its traceback was printed."""
    if issubclass(kind, KeyboardInterrupt):
        print("vllm-davinci: Interrupted.", file=sys.stderr)
        return 128 + signal.SIGINT
    if words := words_of(error, trace):
        print(f"{' '.join(_command())}: error: {words} ({TRACEBACK})", file=sys.stderr)
        return 1
    sys.__excepthook__(kind, error, trace)
    return None


def words_of(error: BaseException, trace: TracebackType | None) -> str:
    """The text of a configuration error in one line; empty for any other error."""
    text = str(error)
    if text.startswith(ENGINE_FAILED):
        return ENGINE_FAILED_WORDS
    if not isinstance(error, CoreError) and not CONFIGURES & set(_functions(trace)):
        return ""
    if isinstance(error, AssertionError | ImportError | AttributeError | NameError | TypeError):
        return ""  # errors of code, not of settings
    validated: Callable[[], list[dict[str, Any]]] | None = getattr(error, "errors", None)
    if callable(validated):  # pydantic's, about one or more settings
        told = [_setting(each) for each in validated()]
        text = "; ".join(told)
    return " ".join(f"{text} {advice_on(text)}".split())


def _setting(found: dict[str, Any]) -> str:
    words = str(found["msg"]).removeprefix("Value error, ")
    place = ".".join(map(str, found.get("loc", ())))
    return f"{place}: {words}" if place else words


def advice_on(text: str) -> str:
    """Returns advice for vLLM's errors that give none; empty for other errors."""
    if heads := re.search(r"attention heads \((\d+)\) must be divisible by tensor parallel", text):
        count = int(heads[1])
        sizes = ", ".join(str(size) for size in range(1, count + 1) if count % size == 0)
        return f"Start with --tensor-parallel-size and one of: {sizes}."
    if text.startswith(f"[Errno {errno.EADDRINUSE}]"):
        return "Start with another --port, or end the server that has it."
    for path in re.findall(r"'([./~][^']*)'", text):
        if not Path(path).expanduser().exists():
            return f"There is no {path} on this host: name a directory with a config.json."
    return ""


def _functions(trace: TracebackType | None) -> Iterator[str]:
    while trace is not None:
        yield trace.tb_frame.f_code.co_name
        trace = trace.tb_next


def _command() -> list[str]:
    """The command without its options, such as `vllm serve`."""
    return [Path(sys.argv[0]).name, *(word for word in sys.argv[1:2] if word[:1] != "-")]


def _say_and_end(record: logging.LogRecord) -> bool:
    """Log filter: ends the engine here if it could not start because of a configuration error."""
    error = record.exc_info[1] if record.exc_info else None
    words = " ".join(str(error).split())
    if words.startswith(WORKER_FAILED):
        words = WORKER_FAILED_WORDS
    elif not isinstance(error, ValueError | CoreError):
        return True
    if record.getMessage() != NOT_STARTED or not is_of_engine():
        return True
    logging.getLogger(ENGINE_LOGGER).error("%s %s (%s)", NOT_STARTED[:-1] + ":", words, TRACEBACK)
    _end_workers(error.__traceback__ if error is not None else None)
    raise SystemExit(1)


def _end_workers(trace: TracebackType | None) -> None:
    """Ends the workers of the executor in whose call a start failed.

    vLLM does this only when the process ends: the workers notice it, the executor reports them as
    dead, and multiprocessing's tracker frees shared memory, which warns.
    """
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor  # not in one-rank engines

    for frame, _ in walk_tb(trace):
        if isinstance(executor := frame.f_locals.get("self"), MultiprocExecutor):
            executor.shutdown()
            return


def _shorten_of_worker(record: logging.LogRecord) -> bool:
    """Log filter: shortens a worker's log of settings that it refuses at start to one line."""
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, CoreError) or isinstance(error, RankFaultError):
        return True
    if STARTS_WORKER & set(_functions(error.__traceback__)):
        words = " ".join(str(error).split())
        record.msg = f"{record.getMessage().removesuffix('.')}: %s (%s)"
        record.args = (words, TRACEBACK)
        record.exc_info = record.exc_text = None
    return True
