"""A stopped rank is reported when a call has waited for its time limit, and not earlier."""

import os
from pathlib import Path

import pytest
import zmq

from vllm_davinci.core.distributed.fault_channel import Fault
from vllm_davinci.core.process import liveness
from vllm_davinci.core.process.liveness import SocketFiles, StoppedRanks

STOPPED = Fault(1, "host", 4242)


class Engine:
    """An engine for a watch whose thread sleeps during the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(liveness, "LOOKS_EVERY_S", 3600.0)
        monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "100")
        self.stopped: list[Fault] = []
        self.calls, self.is_busy = 5, False
        self.told: list[str] = []
        self.watch = StoppedRanks(
            lambda: self.stopped,
            lambda: self.calls,
            lambda: self.is_busy,
            lambda fault: self.told.append(str(fault)),
        )

    def look(self, *times_s: float) -> None:
        for at_s in times_s:
            self.watch.look(at_s)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(monkeypatch)


def test_a_stopped_rank_without_waiting_calls_is_not_reported(engine: Engine):
    engine.look(0)
    engine.stopped = [STOPPED]
    engine.look(1, 2, 1000, 100_000)
    assert engine.told == []


def test_a_call_waits_until_its_limit_and_then_names_the_rank(engine: Engine):
    engine.stopped = [STOPPED]
    engine.look(1, 2)
    engine.calls += 1
    engine.look(3, 72.9)
    assert engine.told == []
    engine.look(73)
    (told,) = engine.told
    assert told == (
        "The process of rank 1 (pid 4242 on host host) is stopped, by SIGSTOP or a debugger, and "
        "call 6 of its worker has waited 70 s for it. A longer wait: "
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=SECONDS."
    )


def test_a_call_that_came_just_before_it_was_seen_waits_too(engine: Engine):
    engine.look(0)
    engine.calls += 1
    engine.stopped = [STOPPED]
    engine.look(1, 71)
    assert len(engine.told) == 1


def test_a_rank_that_continues_in_time_is_forgotten(engine: Engine):
    engine.stopped, engine.is_busy = [STOPPED], True
    engine.look(1, 70)
    engine.stopped = []
    engine.look(71)
    engine.stopped, engine.is_busy = [STOPPED], False
    engine.look(72, 1000)
    assert engine.told == []


def test_files_of_sockets_that_a_program_has_closed_are_removed(tmp_path: Path):
    contexts = [zmq.Context(), zmq.Context()]
    sockets = [context.socket(zmq.ROUTER) for context in contexts]
    for name, socket in zip(("start", "requests"), sockets, strict=True):
        socket.bind(f"ipc://{tmp_path / name}")
    files = SocketFiles(os.getpid())
    left = []
    for closed in ([], *([context] for context in contexts)):
        for context in closed:
            context.destroy(linger=0)
        files.remove_closed()
        left.append({file.name for file in tmp_path.iterdir()})
    assert left == [{"start", "requests"}, {"requests"}, set()]
