"""The status of a server whose engine died."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

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
# By both clocks: records of Ray, where it is installed, have their times from the second.
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
    "headless_is_told": (
        f"{HEADLESS}\nsays('Waiting up to 5 seconds')\nsays('Shutting down.')",
        0,
    ),
    # A program that uses an engine decides itself what follows from its death.
    "not_a_server": (f"{DIES_ACCORDING_TO_WAITER}", 0),
}
REPORTS = {
    "death_not_told": (DIES_ACCORDING_TO_WAITER, True),
    "death_told": (f"{IS_TOLD}\n{DIES_ACCORDING_TO_WAITER}", False),
}
# What comes before the handler is there, and after.
PROGRAMS = {
    **{name: (QUIET, program) for name, (program, _) in STATUSES.items()},
    **{name: ("", program) for name, (program, _) in REPORTS.items()},
}

# One interpreter imports vLLM; each program runs in a fork of it, which ends as interpreters do.
RUN_EACH = """
import gc, json, logging, os, sys, tempfile
import vllm.entrypoints.launchers.launcher
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging
from vllm.v1.engine.exceptions import EngineDeadError
from vllm_davinci.core.process.server_exit import fail_when_engine_dies

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
    """Status and output of each of PROGRAMS."""
    done = subprocess.run(
        [sys.executable, "-c", RUN_EACH, json.dumps(PROGRAMS)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    found: dict[str, tuple[int, str]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", STATUSES)
def test_a_server_fails_when_its_engine_died_and_nobody_else_does(
    name: str, ended: dict[str, tuple[int, str]]
):
    status, printed = ended[name]
    assert status == STATUSES[name][1], printed


@pytest.mark.parametrize("name", REPORTS)
def test_the_end_of_an_engine_that_was_told_to_end_is_no_error(
    name: str, ended: dict[str, tuple[int, str]]
):
    _, printed = ended[name]
    assert ("output_handler failed" in printed) is REPORTS[name][1], printed
