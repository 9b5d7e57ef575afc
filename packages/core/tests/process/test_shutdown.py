"""The handler of Ctrl-C, what ends with a process, and a server's status after its engine died."""

import json
import multiprocessing
import queue
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from vllm.v1.engine.core_client import SyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_davinci.core.process import shutdown
from vllm_davinci.core.process.shutdown import Remains, tell_waiting_callers
from vllm_davinci_testing.processes.forked import run_alone

SERVER = "import vllm.entrypoints.launchers.launcher"
DIES_ACCORDING_TO_CLIENT = (
    'logging.getLogger("vllm.v1.engine.core_client").warning('
    '"[shutdown] MPClient: engine core exited unexpectedly; starting cleanup")'
)
DIES_ACCORDING_TO_WAITER = """
try:
    raise EngineDeadError()
except EngineDeadError:
    logging.getLogger("vllm.v1.engine.async_llm").exception("AsyncLLM output_handler failed.")
"""

IS_TOLD = (
    f'logging.getLogger("{SERVER.removeprefix("import ")}")'
    '.info("[shutdown] API server: shutdown triggered")'
)
HEADLESS = """
def says(words):
    logging.getLogger("vllm.entrypoints.cli.serve").info(words)

says("Launching 1 data parallel engine(s) in headless mode, with head node address tcp://h:1.")
"""
# Moves both clocks, because Ray, if installed, records times of `time_ns`.
LATER = """
import time
at, at_ns = time.time, time.time_ns
time.time, time.time_ns = lambda: at() + 60, lambda: at_ns() + 60_000_000_000
"""
CONFIGURED_AGAIN = """
import logging.config
from vllm_davinci.core.platform import NPUPlatform
logging.config.dictConfig(
    {"version": 1, "disable_existing_loggers": False, "loggers": {"vllm": {"handlers": []}}}
)
NPUPlatform.log_warnings()
"""
QUIET = 'logging.getLogger("vllm").setLevel(logging.WARNING)'

STATUSES = {
    "reported_by_client": (f"{SERVER}\n{DIES_ACCORDING_TO_CLIENT}", 1),
    "reported_by_waiter": (f"{SERVER}\n{DIES_ACCORDING_TO_WAITER}", 1),
    "lives": (SERVER, 0),
    "told_before": (f"{SERVER}\n{IS_TOLD}\n{DIES_ACCORDING_TO_CLIENT}", 0),
    "told_at_the_same_time": (f"{SERVER}\n{DIES_ACCORDING_TO_CLIENT}\n{IS_TOLD}", 0),
    "told_long_after": (f"{SERVER}\n{DIES_ACCORDING_TO_CLIENT}\n{LATER}\n{IS_TOLD}", 1),
    "configured_again": (f"{SERVER}\n{CONFIGURED_AGAIN}\n{DIES_ACCORDING_TO_CLIENT}", 1),
    "configured_again_after": (f"{SERVER}\n{DIES_ACCORDING_TO_CLIENT}\n{CONFIGURED_AGAIN}", 1),
    "headless_dies": (f"{HEADLESS}\nsays('Shutting down.')", 1),
    "headless_is_told": (f"{HEADLESS}\nsays('Waiting up to 5 seconds')\nsays('Shutting down.')", 0),
    # A program that uses an engine decides what follows the engine's death.
    "not_a_server": (f"{DIES_ACCORDING_TO_WAITER}", 0),
}
REPORTS = {
    "death_not_told": (DIES_ACCORDING_TO_WAITER, True),
    "death_told": (f"{IS_TOLD}\n{DIES_ACCORDING_TO_WAITER}", False),
}
# What runs before the handler is installed, and after.
PROGRAMS = {
    **{name: (QUIET, program) for name, (program, _) in STATUSES.items()},
    **{name: ("", program) for name, (program, _) in REPORTS.items()},
}

# One interpreter imports vLLM; each program runs in a fork that ends like an interpreter.
RUN_EACH = """
import gc, json, logging, os, sys, tempfile
import vllm.entrypoints.launchers.launcher
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging
from vllm.v1.engine.exceptions import EngineDeadError
from vllm_davinci.core.process.shutdown import fail_when_engine_dies

del sys.modules["vllm.entrypoints.launchers.launcher"]  # what it imports stays
configure_logging(LoggingConfig())
gc.freeze()
ended = {}
for name, (before, program) in json.loads(sys.argv[1]).items():
    with tempfile.TemporaryFile() as printed:
        child = os.fork()
        if child == 0:
            ended = None  # printed by the parent alone
            os.dup2(printed.fileno(), 1)
            os.dup2(printed.fileno(), 2)
            exec(before)
            fail_when_engine_dies()
            fail_when_engine_dies()
            exec(program)
            break
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        printed.seek(0)
        ended[name] = status, printed.read().decode(errors="replace")
if ended is not None:
    print(json.dumps(ended))
"""


@pytest.fixture(scope="module")
def ended() -> dict[str, tuple[int, str]]:
    """Returns status and output of each of PROGRAMS."""
    done = subprocess.run(
        [sys.executable, "-c", RUN_EACH, json.dumps(PROGRAMS)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    found: dict[str, tuple[int, str]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.nightly("faults")
@pytest.mark.parametrize("name", STATUSES)
def test_only_a_server_fails_when_its_engine_has_died(name: str, ended: dict[str, tuple[int, str]]):
    status, printed = ended[name]
    assert status == STATUSES[name][1], printed


@pytest.mark.nightly("faults")
@pytest.mark.parametrize("name", REPORTS)
def test_a_requested_shutdown_of_an_engine_is_no_error(name, ended):
    _, printed = ended[name]
    assert ("output_handler failed" in printed) is REPORTS[name][1], printed


ENTRY = ("program.py", "<module>")
POLL = ("zmq/sugar/poll.py", "poll")
CLIENT = ("/somewhere/vllm/v1/engine/core_client.py", "__init__")


@pytest.fixture(autouse=True)
def _python_handles_interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_is_still_an_interrupt(monkeypatch: pytest.MonkeyPatch):
    # Acts as a user's process, because this one may be a fork that runs some of the tests.
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: None)
    shutdown.take_over_signals(0)
    shutdown.take_over_signals(0)
    assert signal.getsignal(signal.SIGINT) is shutdown.interrupt
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_handler_of_the_program_stays():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    shutdown.take_over_signals(0)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.parametrize(
    ("stack", "waits"),
    [
        ([POLL, POLL, CLIENT, ENTRY], True),
        ([POLL, ("vllm/v1/engine/utils.py", "wait_for_engine_startup"), CLIENT, ENTRY], False),
        ([("vllm/v1/engine/core_client.py", "__call__"), CLIENT, ENTRY], False),
        ([POLL, POLL], False),
        ([ENTRY], False),
        ([], False),
    ],
    ids=["second_wait", "first_wait", "cleaning_up", "another_poll", "running", "ended"],
)
def test_only_the_second_wait_is_interrupted_again(stack: list[tuple[str, str]], waits: bool):
    assert shutdown.waits_for_ready_engine(stack) is waits


LIMIT_S = 30.0


class Resources:
    """A client whose engine died, which is reported once the test allows it."""

    def __init__(self) -> None:
        self.asked, self.may_tell = threading.Event(), threading.Event()

    @property
    def engine_dead(self) -> bool:
        self.asked.set()
        self.may_tell.wait(LIMIT_S)
        return True


class Passing:
    """An object that the program drops while another thread runs."""


def test_the_reporting_thread_references_only_the_clients():
    # The interpreter ends while a thread still runs and holds its frames; libraries that list
    # unfreed objects would list everything that these reference.
    client = SyncMPClient.__new__(SyncMPClient)
    resources = Resources()
    client.resources, client.outputs_queue, client.utility_results = resources, queue.Queue(), {}
    passing = Passing()
    is_there = weakref.ref(passing)
    teller = threading.Thread(target=tell_waiting_callers, daemon=True)
    teller.start()
    assert resources.asked.wait(LIMIT_S)
    del passing
    assert is_there() is None
    resources.may_tell.set()
    teller.join(LIMIT_S)
    assert isinstance(client.outputs_queue.get_nowait(), EngineDeadError)


HOLDS_SOCKET = """
import signal, socket, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
bound = socket.socket(socket.AF_UNIX)
bound.bind(sys.argv[1])
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def test_remaining_processes_end_with_their_children_and_sockets(tmp_path: Path):
    path = tmp_path / "socket"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS_SOCKET, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    own = tmp_path / "own"
    with socket.socket(socket.AF_UNIX) as kept:
        kept.bind(str(own))
        remains = Remains([psutil.Process(process.pid)])
        assert path.exists()
        remains.end()
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert not path.exists()
    assert not own.exists()
    process.wait(10)


SIGNALLED = """
import asyncio, os, signal, sys, time
from vllm_davinci.core.process import shutdown
from vllm_davinci.core.process.shutdown import SignalledEnd

shutdown.ENDS_WITHIN_S = 0.3 if {waits_s} else 60.0
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: print("before", flush=True))
begin = {begin}
SignalledEnd(0.0, begin)
for number in {numbers}:
    os.kill(os.getpid(), number)
    time.sleep(0.15)
time.sleep({waits_s})
sys.exit(7)
"""


@pytest.mark.parametrize(
    ("begin", "numbers", "waits_s", "status", "said"),
    [
        pytest.param("None", [2], 0, 130, "still starting", id="starting"),
        pytest.param("None", [15], 0, 143, "still starting", id="starting_sigterm"),
        pytest.param("lambda: None", [15], 0, 7, "before", id="in_time"),
        pytest.param("lambda: None", [15, 15], 0, 7, "before", id="sigterm_twice"),
        pytest.param("lambda: None", [15], 30, 0, "has not ended within 0 s", id="late"),
        pytest.param("lambda: None", [2, 2], 0, 130, "Ctrl-C again", id="twice"),
        pytest.param("lambda: None", [15, 2], 0, 130, "Ctrl-C again", id="after_sigterm"),
    ],
)
def test_a_signalled_server_ends_in_time(begin, numbers, waits_s, status, said):
    ended = run_alone(SIGNALLED.format(begin=begin, numbers=numbers, waits_s=waits_s))
    assert (ended.status, said in ended.output) == (status, True), ended.output
