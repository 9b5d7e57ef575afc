"""Runs test files in several processes, called lanes, each forked from a pytest that has imported
vLLM.

`--lanes N` imports once what all engines need, then forks N lanes, each with a fork server. A lane
takes one file at a time, longest first, and collects only that. The main process replays lanes'
reports file by file, so that terminal, `--durations`, `-x`, `--lf`, `--junitxml` and exit status
are as without lanes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import warnings
from collections import defaultdict, deque
from collections.abc import Iterator
from fnmatch import fnmatch
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_davinci_testing.lane import relative, run_lane
from vllm_davinci_testing.processes import fork_server
from vllm_davinci_testing.times import expected_seconds

# Time for a lane to end its tests and engines after Ctrl-C, or after a failure that stops the run.
END_LIMIT_S = 90.0
_FORK = multiprocessing.get_context("fork")


def test_files(config: pytest.Config) -> dict[Path, list[str]]:
    """Maps each test file that a run's arguments name or contain to these arguments."""
    files: dict[Path, list[str]] = {}
    for argument in config.args:
        path = Path(os.path.abspath(config.invocation_params.dir / argument.split("::")[0]))
        if path.is_dir():
            for file in _files_below(path, config):
                files[file] = [str(file)]
        else:
            rest = argument[len(argument.split("::")[0]) :]
            files.setdefault(path, []).append(f"{path}{rest}")
    return files


def _files_below(folder: Path, config: pytest.Config) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if config.hook.pytest_ignore_collect(collection_path=path, config=config):
            continue
        if path.is_dir():
            yield from _files_below(path, config)
        elif any(fnmatch(path.name, pattern) for pattern in config.getini("python_files")):
            yield path


class Lanes:
    """Replaces pytest's collection and test loop in the main process."""

    def __init__(self, config: pytest.Config, count: int) -> None:
        self._config = config
        self._count = count
        self._stop = _FORK.Event()
        self._lanes: dict[Connection, _Lane] = {}
        self._number_of_files = self._files_done = 0

    def pytest_collection(self) -> bool:
        return True  # each lane collects its own files

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        seconds = expected_seconds(self._config)
        files = test_files(self._config)
        # Sorting is stable: files with equal times keep their order.
        order = sorted(files, key=lambda path: -seconds(relative(path, self._config)))
        self._waiting = deque((path, files[path], frozenset[str]()) for path in order)
        self._number_of_files = len(order)
        self._began_s = monotonic()
        fork_server.import_for_forks(self._config.getoption("lanes_import"))
        for number in range(min(self._count, len(order))):
            self._start(session, number)
        try:
            while self._lanes:
                for connection in wait(list(self._lanes)):
                    assert isinstance(connection, Connection)
                    self._receive(session, self._lanes[connection])
                if session.shouldfail or session.shouldstop:
                    self._stop.set()
        finally:
            self._end(session)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        return True

    def _start(self, session: pytest.Session, number: int) -> None:
        here, there = _FORK.Pipe()
        directory = session.config._tmp_path_factory.mktemp(f"lane{number}-")  # type: ignore[attr-defined]
        process = _FORK.Process(
            target=run_lane, args=(session, there, [here, *self._lanes], self._stop, directory)
        )
        # Python 3.12 warns about forks if imported libraries have threads.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        there.close()
        self._lanes[here] = _Lane(number, here, process)

    def _receive(self, session: pytest.Session, lane: _Lane) -> None:
        message = None
        with contextlib.suppress(EOFError, ConnectionResetError):
            message = lane.connection.recv()
        if message is None:
            self._ended(session, lane)
            return
        kind, *values = message
        if kind == "next":
            file = None
            if self._waiting and not self._stop.is_set():
                file = self._waiting.popleft()
                lane.files[relative(file[0], self._config)] = file
            lane.connection.send(file)
        elif kind == "wrong":
            raise pytest.UsageError(*values)
        elif kind == "done":
            del lane.files[values[0]]
            self._replay(session, lane, values[0])
        else:
            lane.take(kind, values)

    def _replay(self, session: pytest.Session, lane: _Lane, file: str) -> None:
        """Passes a file's test reports to the main process's plugins."""
        hook, config = self._config.hook, self._config
        reports = lane.reports.pop(file, [])
        has_run = any(kind == "runtest_logstart" for kind, *_ in reports)
        for kind, *values in reports:
            if kind == "runtest_logreport":
                report = hook.pytest_report_from_serializable(config=config, data=values[0])
                hook.pytest_runtest_logreport(report=report)
            elif kind == "collectreport":
                report = hook.pytest_report_from_serializable(config=config, data=values[0])
                hook.pytest_collectreport(report=report)
            elif kind == "warning_recorded":
                _replay_warning(config, *values)
            elif kind == "collected":
                number, deselected, left_out, clock = values
                session.testscollected += number
                hook.pytest_deselected(items=[SimpleNamespace(nodeid=each) for each in deselected])
                config.pluginmanager.get_plugin("davinci-selection").left_out.update(left_out)
                config.pluginmanager.get_plugin("davinci-summary").times.collected(file, clock)
            else:
                nodeid, location = values
                getattr(hook, f"pytest_{kind}")(nodeid=nodeid, location=location)
        self._files_done += 1
        minutes, seconds = divmod(int(monotonic() - self._began_s), 60)
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        if has_run and reporter is not None:
            place = f" [{self._files_done}/{self._number_of_files} {minutes}:{seconds:02}]"
            reporter.write(place, flush=True)

    def _ended(self, session: pytest.Session, lane: _Lane) -> None:
        """Handles the end of a lane's process: after its last file, or because a test ended it."""
        del self._lanes[lane.connection]
        lane.process.join(END_LIMIT_S)
        lane.connection.close()
        if not lane.files:
            return
        file, (path, arguments, done) = next(iter(lane.files.items()))
        del lane.files[file]
        self._waiting.extendleft(lane.files.values())
        nodeid, location = lane.running or (file, (file, None, file))
        report = pytest.TestReport(
            nodeid, location, {}, "failed",
            f"The process of its lane ended meanwhile, with status {lane.process.exitcode}.",
            "call",
        )  # fmt: skip
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        lane.take("runtest_logreport", [data])
        done |= lane.finished | {nodeid}
        self._replay(session, lane, file)
        if lane.running is not None and not self._stop.is_set():
            self._files_done -= 1
            self._waiting.appendleft((path, arguments, done))
        if self._waiting and not self._stop.is_set():
            self._start(session, lane.number)

    def _end(self, session: pytest.Session) -> None:
        """Ends running lanes: each after its current test, or at once after the time limit."""
        self._stop.set()
        deadline = monotonic() + END_LIMIT_S
        for connection, lane in self._lanes.items():
            for file in list(lane.reports):
                self._replay(session, lane, file)
            connection.close()
            lane.process.join(max(0.1, deadline - monotonic()))
            if lane.process.is_alive():
                lane.process.kill()
                lane.process.join()


class _Lane:
    """A lane, as seen by the main process.

    files:    files that it has taken, with their arguments and finished cases
    reports:  reports of their tests, by file
    running:  node id and location of the current test
    finished: node ids of its tests that have ended
    """

    def __init__(self, number: int, connection: Connection, process: Any) -> None:
        self.number = number
        self.connection = connection
        self.process = process
        self.files: dict[str, tuple[Path, list[str], frozenset[str]]] = {}
        self.reports: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
        self.running: tuple[str, Any] | None = None
        self.finished: set[str] = set()

    def take(self, kind: str, values: list[Any]) -> None:
        if kind == "runtest_logstart":
            self.running = (values[0], values[1])
        elif kind == "runtest_logfinish":
            self.running = None
            self.finished.add(values[0])
        data = values[0]
        name = data["nodeid"] if isinstance(data, dict) else data
        if kind in ("collected", "collectreport", "warning_recorded"):
            name, values = values[0], values[1:]
        self.reports[name.split("::")[0]].append((kind, *values))


def _replay_warning(
    config: pytest.Config, nodeid: str, when: str, message: str, category: str, *place: Any
) -> None:
    recorded = warnings.WarningMessage(message, type(category, (Warning,), {}), *place)
    config.hook.pytest_warning_recorded.call_historic(
        kwargs={
            "warning_message": recorded, "when": when, "nodeid": nodeid, "location": None,
        }
    )  # fmt: skip
