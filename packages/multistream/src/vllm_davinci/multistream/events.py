"""Events, allocated once and used again in every step."""

from vllm_davinci.multistream.device import Device, Event, Stream


class EventPool:
    """A list of events, reused from the start in every step.

    An event may be recorded again while a wait is pending: a wait refers to the record before it.
    So one pass per step suffices, and no event is freed while the device needs it.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._events: list[Event] = []
        self._next = 0

    def begin_step(self) -> None:
        """Starts a step, which reuses the events of the last one."""
        self._next = 0

    def take(self) -> Event:
        """The next event of this step."""
        if self._next == len(self._events):
            self._events.append(self._device.new_event())
        event = self._events[self._next]
        self._next += 1
        return event

    def take_pair(self) -> tuple[Event, Event]:
        """The next two events of this step."""
        first = self._next
        if first + 2 > len(self._events):
            return self.take(), self.take()
        self._next = first + 2
        return self._events[first], self._events[first + 1]

    @property
    def allocated(self) -> int:
        """Number of events allocated so far, for the largest step."""
        return len(self._events)


def hand_over(event: Event, source: Stream, target: Stream) -> None:
    """Makes later work of `target` wait for earlier work of `source`."""
    event.record(source)
    target.wait_event(event)
