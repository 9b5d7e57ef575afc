"""A device that does no work and records the requested order."""

from __future__ import annotations

import pytest

from vllm_davinci.multistream import Interleave, StreamPool


class Recording:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def synchronize(self) -> None:
        self._log.append(f"host waits for {self.name}")


class RecordingStream(Recording):
    def wait_event(self, event: RecordingEvent) -> None:
        self._log.append(f"{self.name} waits for {event.name}")


class RecordingEvent(Recording):
    def record(self, stream: RecordingStream) -> None:
        self._log.append(f"{self.name} marks {stream.name}")

    def query(self) -> bool:
        return True


class RecordingDevice:
    """log: events in order; `work` appends to it on the current stream"""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.main = self._current = RecordingStream("main", self.log)
        self._num_streams = self._num_events = 0

    def current_stream(self) -> RecordingStream:
        return self._current

    def set_stream(self, stream: RecordingStream) -> None:
        self._current = stream

    def new_stream(self) -> RecordingStream:
        self._num_streams += 1
        return RecordingStream(f"side{self._num_streams}", self.log)

    def new_event(self) -> RecordingEvent:
        self._num_events += 1
        return RecordingEvent(f"event{self._num_events}", self.log)

    def work(self, name: str) -> None:
        self.log.append(f"{name} on {self._current.name}")


@pytest.fixture
def device() -> RecordingDevice:
    return RecordingDevice()


@pytest.fixture
def run() -> Interleave:
    return Interleave(StreamPool())
