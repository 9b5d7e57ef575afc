"""A pytest plugin that writes each test's outcome at once, as a line of JSON.

Loaded by `test_files.py` into processes that run other people's tests: what a crash or a time limit
ends has said which test it was at. The variable CONFORMANCE_OUTCOMES names the file.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

_MESSAGE_LENGTH = 400


def _write(**fields: str) -> None:
    with Path(os.environ["CONFORMANCE_OUTCOMES"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(fields) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    _write(test=nodeid, outcome="begun", message="")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        _write(test=report.nodeid, outcome=report.outcome, message=_last_words(report))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.outcome != "passed":
        _write(test=report.nodeid, outcome=report.outcome, message=_last_words(report))


def _last_words(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why a test was skipped, or the error's first line: not the whole traceback."""
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])[:_MESSAGE_LENGTH]
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(crash.message if crash is not None else report.longrepr)
    return " ".join(text.split())[:_MESSAGE_LENGTH]
