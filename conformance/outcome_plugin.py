"""A pytest plugin that writes each test's outcome immediately, as a line of JSON.

`test_files.py` loads it into processes that run another project's tests: after a crash or a time
limit, the last line names the running test. The variable CONFORMANCE_OUTCOMES names the file.

If a process that a test waits for has failed, the plugin ends the test soon, with the process's
error as message; otherwise the test would wait until its time limit.
"""

import json
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Generator
from pathlib import Path

import pytest

SAMPLED = "sampled"
"""Replaces the outcome with how many of a function's cases run (case_sample.py)."""
_MESSAGE_LENGTH = 800
_ERROR_OF_A_PROCESS = re.compile(r"^\w+Error: .*", re.MULTILINE)
# Time for a test to notice that one of its processes has ended.
_GRACE_S = 15.0


def pytest_configure() -> None:
    # If a test exhausts the machine's memory, the kernel ends only the test's process.
    Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None]:
    is_over = threading.Event()
    before = set(multiprocessing.active_children())
    threading.Thread(target=_watch_processes, args=(is_over,), daemon=True).start()
    try:
        return (yield)
    finally:
        is_over.set()
        # These processes would keep their ports.
        for left_behind in set(multiprocessing.active_children()) - before:
            left_behind.kill()
            left_behind.join()


def _watch_processes(is_over: threading.Event) -> None:
    """Triggers pytest-timeout's alarm when a child process has failed."""
    seen_s: float | None = None
    while not is_over.wait(1.0):
        children = list(multiprocessing.process._children)
        if seen_s is None and any(child.exitcode for child in children):
            seen_s = time.monotonic()
        if seen_s is not None and time.monotonic() - seen_s > _GRACE_S:
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            return


def write(**fields: str) -> None:
    with Path(os.environ["CONFORMANCE_OUTCOMES"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(fields) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    write(test=nodeid, outcome="begun", message="")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        write(test=report.nodeid, outcome=report.outcome, message=_last_words(report))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.outcome != "passed":
        write(test=report.nodeid, outcome=report.outcome, message=_last_words(report))


def _last_words(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Returns why a test was skipped, or its error's first line without traceback.

    For a test that passed, returns the kernels that it launched, if a plugin recorded them.
    """
    if report.outcome == "passed":
        return str(dict(getattr(report, "user_properties", ())).get("launched", ""))
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])[:_MESSAGE_LENGTH]
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(crash.message if crash is not None else report.longrepr)
    if "Timeout" in text and (error := _ERROR_OF_A_PROCESS.search(report.capstderr)):
        text = f"{error.group()} {text}"
    return " ".join(text.split())[:_MESSAGE_LENGTH]
