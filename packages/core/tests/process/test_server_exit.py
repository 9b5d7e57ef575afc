"""The status of a server whose engine died."""

from __future__ import annotations

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
LATER = "import time; at = time.time; time.time = lambda: at() + 60"
QUIET = 'logging.getLogger("vllm").setLevel(logging.WARNING)'


@pytest.mark.parametrize(
    ("program", "status"),
    [
        (f"{SERVER}\n{DIES_ACCORDING_TO_CLIENT}", 1),
        (f"{SERVER}\n{DIES_ACCORDING_TO_WAITER}", 1),
        (SERVER, 0),
        (f"{SERVER}\n{IS_TOLD}\n{DIES_ACCORDING_TO_CLIENT}", 0),
        (f"{SERVER}\n{DIES_ACCORDING_TO_CLIENT}\n{IS_TOLD}", 0),
        (f"{SERVER}\n{DIES_ACCORDING_TO_CLIENT}\n{LATER}\n{IS_TOLD}", 1),
        # A program that uses an engine decides itself what follows from its death.
        (DIES_ACCORDING_TO_WAITER, 0),
    ],
    ids=[
        "reported_by_client",
        "reported_by_waiter",
        "lives",
        "told_before",
        "told_at_the_same_time",
        "told_long_after",
        "not_a_server",
    ],
)
def test_a_server_fails_when_its_engine_died_and_nobody_else_does(program: str, status: int):
    prepared = (
        "import logging\n"
        "import vllm\n"
        "from vllm.v1.engine.exceptions import EngineDeadError\n"
        "from vllm_davinci.core.process.server_exit import fail_when_engine_dies\n"
        f"{QUIET}\n"
        "fail_when_engine_dies()\n"
        "fail_when_engine_dies()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", prepared + program],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == status, ended.stderr


@pytest.mark.parametrize(("is_told", "is_reported"), [(False, True), (True, False)])
def test_the_end_of_an_engine_that_was_told_to_end_is_no_error(is_told: bool, is_reported: bool):
    program = (
        "import logging\nimport vllm\n"
        "from vllm.v1.engine.exceptions import EngineDeadError\n"
        "from vllm_davinci.core.process.server_exit import fail_when_engine_dies\n"
        "fail_when_engine_dies()\n"
        f"{IS_TOLD if is_told else ''}\n{DIES_ACCORDING_TO_WAITER}"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert ("output_handler failed" in done.stdout + done.stderr) is is_reported, done.stderr
