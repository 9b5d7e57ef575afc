"""The stream scheduler that vllm-davinci-core finds through an entry point."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from vllm_davinci.multistream.costs import StepCosts
from vllm_davinci.multistream.device import Event, Stream
from vllm_davinci.multistream.events import EventPool, hand_over
from vllm_davinci.multistream.fork import Fork
from vllm_davinci.multistream.interleave import Interleave
from vllm_davinci.multistream.policy import SplitPolicy, StepFacts
from vllm_davinci.multistream.streams import Role, StreamPool
from vllm_davinci.multistream.turns import communicate, current_ubatch


class StreamScheduler:
    """Stream scheduler of a process, with one stream per role."""

    api_version = 1

    step_facts = StepFacts
    communicate = staticmethod(communicate)
    current_ubatch = staticmethod(current_ubatch)

    def __init__(self) -> None:
        self._streams: StreamPool | None = None
        self._fork_events: EventPool | None = None
        self._name: Callable[[int, str], None] | None = None

    def split_policy(
        self,
        *,
        mode: Any,
        costs: Path | None = None,
        ways: Collection[str] | None = None,
        **rules: Any,
    ) -> SplitPolicy:
        """The split policy of an engine.

        costs: a file of StepCosts, or None; ways: as in StepCosts.read
        mode, rules: the other fields of SplitPolicy
        Raises CostsError.
        """
        read = None if costs is None else StepCosts.read(costs, ways)
        return SplitPolicy(mode=mode, costs=read, **rules)

    def interleave(self) -> Interleave:
        """Creates the Interleave of this device. Call it once the process has chosen its device."""
        return Interleave(self._stream_pool())

    def fork(self, role: str) -> Fork:
        """Forks a side stream from the current one. role: a value of Role

        All forks and `start` share a few events, as each is waited for right after its record.
        """
        streams = self._stream_pool()
        return Fork(streams, self._side_events(streams), Role(role))

    def start(self, role: str, work: Callable[[], object]) -> None:
        """Runs `work()` on a side stream, after the current stream's earlier work.

        The current stream does not wait for it before `finish`, so `work` must neither write what
        that stream uses nor read memory that is freed earlier.
        """
        streams = self._stream_pool()
        main, side = streams.device.current_stream(), streams.stream(Role(role))
        hand_over(self._next_event(streams), main, side)
        streams.device.set_stream(side)
        try:
            work()
        finally:
            streams.device.set_stream(main)

    def finish(self, role: str) -> None:
        """Makes the current stream wait for all started work, as a captured graph requires."""
        streams = self._stream_pool()
        side = streams.stream(Role(role))
        hand_over(self._next_event(streams), side, streams.device.current_stream())

    def name_streams(self, name: Callable[[int, str], None]) -> None:
        """Calls `name` with native handle and role of each stream created later.

        For tools that display streams. Call it before the first step.
        """
        self._name = name

    def _side_events(self, streams: StreamPool) -> EventPool:
        if self._fork_events is None:
            self._fork_events = EventPool(streams.device)
        self._fork_events.begin_step()
        return self._fork_events

    def _next_event(self, streams: StreamPool) -> Event:
        return self._side_events(streams).take()

    def _stream_pool(self) -> StreamPool:
        if self._streams is None:
            self._streams = StreamPool(on_new=self._name_stream)
        return self._streams

    def _name_stream(self, role: Role, stream: Stream) -> None:
        handle = getattr(stream, "native_handle", None)  # a device without streams has none
        if self._name is not None and handle is not None:
            self._name(handle, role.value)
