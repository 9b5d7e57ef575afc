"""Interface to the device: streams and events of torch's current accelerator, or none.

With an accelerator (npu, cuda, ...) the objects are torch.Stream and torch.Event. Without one the
same program runs with streams and events that order nothing, because every operation is
synchronous.
"""

from collections.abc import Callable
from typing import Protocol, cast

import torch


class Event(Protocol):
    """A point of a stream."""

    def record(self, stream: "Stream") -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool: ...


class Stream(Protocol):
    """An in-order queue of device work."""

    def wait_event(self, event: Event) -> None: ...
    def synchronize(self) -> None: ...


class Device(Protocol):
    """The accelerator functions that the orchestration uses."""

    def current_stream(self) -> Stream: ...
    def set_stream(self, stream: Stream) -> None: ...
    def new_stream(self) -> Stream: ...
    def new_event(self) -> Event: ...


class _NoEvent:
    def record(self, stream: Stream) -> None:
        """Does nothing: all earlier work is done."""

    def synchronize(self) -> None:
        """Does nothing: all earlier work is done."""

    def query(self) -> bool:
        return True


class _NoStream:
    def wait_event(self, event: Event) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class HostDevice:
    """A device without streams: each operation ends before its call returns."""

    def __init__(self) -> None:
        self._stream: Stream = _NoStream()

    def current_stream(self) -> Stream:
        return self._stream

    def set_stream(self, stream: Stream) -> None:
        self._stream = stream

    def new_stream(self) -> Stream:
        return _NoStream()

    def new_event(self) -> Event:
        return _NoEvent()


class AcceleratorDevice:
    """The accelerator that torch.accelerator finds, at one index."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Called twice per hand-over, so torch's own function without a wrapper.
        self.set_stream = cast(Callable[[Stream], None], torch.accelerator.set_stream)

    def current_stream(self) -> Stream:
        return cast(Stream, torch.accelerator.current_stream(self._device))

    def new_stream(self) -> Stream:
        return cast(Stream, torch.Stream(self._device))

    def new_event(self) -> Event:
        return cast(Event, torch.Event(self._device))


def current_device() -> Device:
    """The accelerator that this process uses; HostDevice if it has none."""
    # A build for an accelerator may run on a machine without its driver.
    if not torch.accelerator.is_available() or torch.accelerator.device_count() == 0:
        return HostDevice()
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return AcceleratorDevice(torch.device(kind.type, torch.accelerator.current_device_index()))
