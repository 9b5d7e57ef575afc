"""Runs the tests of one file after another in a lane, and sends their reports."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from _pytest import tmpdir
from _pytest._io import TerminalWriter

from vllm_davinci_testing.processes import fork_server
from vllm_davinci_testing.times import Clock


def relative(path: Path, config: pytest.Config) -> str:
    """Returns a file's path as in node ids."""
    return os.path.relpath(path, config.rootpath)


def run_lane(
    session: pytest.Session,
    connection: Connection,
    of_others: Sequence[Connection],
    stop: Any,
    directory: Path,
) -> None:
    """Runs in a lane's process. directory: for its temporary files"""
    for other in of_others:
        other.close()
    config = session.config
    capture = config.pluginmanager.get_plugin("capturemanager")
    capture.stop_global_capturing()  # other lanes share its files
    capture.start_global_capturing()
    capture.suspend_global_capture()
    config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(_NoReporter(), "terminalreporter")
    config.option.basetemp = str(directory / "tmp")
    tmpdir.pytest_configure(config)
    if refused := config.pluginmanager.get_plugin("davinci-refused-calls"):
        refused.write_to(directory / "refusals")
    fork_server.be_served_by_a_fork(connection)
    sender = _Sender(config, connection)
    config.pluginmanager.register(sender, "davinci-lane")
    # When the run ends, this process is also interrupted, or its connection closed.
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        _run_items(session, sender, stop)
    session._setupstate.teardown_exact(None)
    connection.close()


def _run_items(session: pytest.Session, sender: _Sender, stop: Any) -> None:
    items = sender.items(session)
    item = next(items, None)
    while item is not None:
        is_over = stop.is_set() or session.shouldfail or session.shouldstop
        following = None if is_over else next(items, None)
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        is_over = is_over or session.shouldfail or session.shouldstop
        if is_over or following is None or following.path != item.path:
            sender.done(item.path)
        item = None if is_over else following


class _NoReporter:
    """Replaces pytest's terminal reporter for plugins that need a terminal writer."""

    def __init__(self) -> None:
        self._tw = TerminalWriter(Path(os.devnull).open("w"))  # noqa: SIM115 - for good


class _Sender:
    """A lane's plugin, which sends collected tests and their reports."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config = config
        self._connection = connection
        self._deselected: list[str] = []
        self._file = ""
        self._folders: dict[Path, pytest.Collector] = {}

    def items(self, session: pytest.Session) -> Iterator[pytest.Item]:
        """Yields the tests of one file after another; requests the next file when one is done."""
        selection = self._config.pluginmanager.get_plugin("davinci-selection")
        while file := self._ask():
            path, arguments, done = file
            self._file = relative(path, self._config)
            clock = Clock()
            self._deselected, selection.left_out = [], Counter()
            try:
                found = session.perform_collect(arguments)
            except pytest.UsageError as error:
                self._send("wrong", *error.args)
                return
            chosen = [item for item in found if item.nodeid not in done]
            self._send(
                "collected", self._file, len(chosen), self._deselected, selection.left_out,
                clock.read(),
            )  # fmt: skip
            if not chosen:
                self._send("done", self._file)
            yield from chosen

    def _ask(self) -> Any:
        self._send("next")
        return self._connection.recv()

    def _send(self, *message: Any) -> None:
        self._connection.send(message)

    def done(self, path: Path) -> None:
        self._send("done", relative(path, self._config))

    @pytest.hookimpl(wrapper=True)
    def pytest_collect_directory(self, path: Path) -> Generator[None, Any, Any]:
        """Returns one node per folder for all files, which holds the fixtures of conftests."""
        node = yield
        return node if node is None else self._folders.setdefault(path, node)

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_finish(self, session: pytest.Session) -> Generator[None]:
        """pytest drops conftests of folders outside a collection, but later files may need them."""
        pending = session._fixturemanager._pending_conftests
        kept = dict(pending)
        yield
        pending.update(kept)

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        self._deselected += [item.nodeid for item in items]

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self._send("runtest_logstart", nodeid, location)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._send("runtest_logreport", self._serialized(report))

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self._send("runtest_logfinish", nodeid, location)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._send("collectreport", self._file, self._serialized(report))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str
    ) -> None:
        if not self._file:
            return  # the main process has shown it
        w = warning_message
        self._send(
            "warning_recorded", nodeid or self._file, nodeid, when, str(w.message),
            w.category.__name__, w.filename, w.lineno,
        )  # fmt: skip

    def _serialized(self, report: Any) -> Any:
        return self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
