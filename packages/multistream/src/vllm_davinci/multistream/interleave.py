"""Runs the forwards of several ubatches in turn on one thread.

Each forward is ordinary Python that calls collectives. It runs in a greenlet of its own; a
collective is the only place where it yields:

    before = compute stream so far
    communication stream: waits for `before`, runs the collective, marks `after`
    -> the next ubatch runs, and launches its work on the compute stream
    compute stream: waits for `after`; the first ubatch continues

So one stream computes, the other communicates, and the order of launches is the same on every rank.

A collective whose sizes come from another one runs in two steps: while the next ubatch's work runs,
the host reads the sizes, then launches it before that ubatch's own collective.
"""

import contextvars
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import greenlet

from vllm_davinci.multistream.device import Event, Stream
from vllm_davinci.multistream.errors import MultistreamError
from vllm_davinci.multistream.events import EventPool
from vllm_davinci.multistream.lifetime import KeepAlive
from vllm_davinci.multistream.streams import Role, StreamPool

T = TypeVar("T")

logger = logging.getLogger(__name__)


class _Abort(greenlet.GreenletExit):
    """Raised in the other ubatches when one failed, to unwind their frames."""


@dataclass
class _Postponed:
    """A collective whose sizes the host reads from another collective.

    index: its ubatch; after: event that marks its end on the communication stream
    """

    index: int
    after: Event
    work: Callable[[], Any] = lambda: None
    result: Any = None
    is_launched: bool = False


class UBatchGreenlet(greenlet.greenlet):
    """A greenlet with a reference to its run, in place of module-level state.

    following: the ubatch whose turn is next; itself if no other has work left
    """

    following: "UBatchGreenlet"

    def __init__(self, body: Callable[[], None], run: "Interleave", index: int) -> None:
        super().__init__(body, greenlet.getcurrent())
        self.interleave = run
        self.index = index

    def let_others_run(self) -> None:
        """Runs the other ubatches until it is this one's turn again."""
        run = self.interleave
        if run.is_aborting:  # this ubatch caught its abort, or communicates while it unwinds
            raise _Abort("another ubatch of this step failed")
        following = self.following
        if following is self:
            return
        run.num_switches += 1
        try:
            following.switch()
        finally:
            if run.on_switch is not None:
                run.on_switch(self.index)


class Interleave:
    """Runs N forwards as greenlets of the calling thread, strictly in turn.

    streams: supplies the communication stream; the compute stream is the caller's current one
    """

    def __init__(self, streams: StreamPool) -> None:
        self.streams = streams
        self._device = streams.device
        self.events = EventPool(streams.device)
        self._live: list[UBatchGreenlet] = []
        self.postponed: list[_Postponed] = []
        self.compute: Stream = streams.device.current_stream()
        self.communication = self.compute
        self.num_switches = 0  # switches in the newest run
        self.num_unswitched = 0  # collectives of the newest run without a yield
        self.on_switch: Callable[[int], None] | None = None
        self.in_exchange = False
        self.is_aborting = False

    def run(
        self, forwards: Sequence[Callable[[], T]], on_switch: Callable[[int], None] | None = None
    ) -> list[T]:
        """Runs all forwards to their end; their results in order.

        on_switch: called with a ubatch's index when it starts, resumes or is unwound

        The first exception ends the run: the other ubatches are unwound at the collective they wait
        in, and that exception is raised. No greenlet is left behind.
        """
        if self._live:
            raise MultistreamError("this Interleave is already running; use one run at a time.")
        results: list[Any] = [None] * len(forwards)
        self.on_switch = on_switch
        self.compute = self._device.current_stream()
        self.communication = self.streams.stream(Role.COMMUNICATION)
        self.events.begin_step()
        self.num_switches = self.num_unswitched = 0
        for index, forward in enumerate(forwards):
            self._live.append(self._ubatch(index, forward, results))
        for place, part in enumerate(self._live):
            part.following = self._live[(place + 1) % len(self._live)]
        try:
            # Control returns here when any ubatch ends.
            while any(not part.dead for part in self._live):
                for part in self._live:
                    if not part.dead:
                        part.switch()
            return results
        except BaseException:
            self._abort()
            raise
        finally:
            self._live = []
            self.on_switch = None
            self.postponed.clear()
            self._device.set_stream(self.compute)

    def _ubatch(
        self, index: int, forward: Callable[[], object], results: list[Any]
    ) -> UBatchGreenlet:
        def body() -> None:
            try:
                if self.on_switch is not None:
                    self.on_switch(index)
                results[index] = forward()
            finally:
                self._leave_turns(self._live[index])

        part = UBatchGreenlet(body, self, index)
        part.gr_context = contextvars.copy_context()  # a greenlet's context starts empty
        return part

    def _leave_turns(self, part: UBatchGreenlet) -> None:
        for other in self._live:
            if other.following is part:
                other.following = part.following

    def _abort(self) -> None:
        """Unwinds each ubatch that still waits in a collective, whatever the others raise."""
        self.is_aborting = True
        self.postponed.clear()
        try:
            for part in self._live:
                if not part.dead and part:  # those not yet started have nothing to unwind
                    try:
                        part.throw(_Abort("another ubatch of this step failed"))
                    except Exception:
                        logger.exception(
                            "Ubatch %d raised an error of its own while it was stopped because of "
                            "another ubatch's error. See that first error.",
                            part.index,
                        )
        finally:
            self.is_aborting = False

    def launch_postponed(self, index: int) -> None:
        """Launches postponed collectives in ubatch order, while ubatch `index` runs."""
        while self.postponed:
            step = self.postponed.pop(0)
            if self.on_switch is not None:
                self.on_switch(step.index)
            self._device.set_stream(self.communication)
            step.is_launched = True
            try:
                step.result = self.in_line(step.work)
            finally:
                self._device.set_stream(self.compute)
                step.after.record(self.communication)
                if self.on_switch is not None:
                    self.on_switch(index)

    def in_line(self, work: Callable[[], T]) -> T:
        """Runs `work`, launching its collectives immediately."""
        self.in_exchange = True
        try:
            return work()
        finally:
            self.in_exchange = False

    def exchange_beside(self, work: Callable[[], T], part: UBatchGreenlet) -> T:
        """Launches several collectives of `part` on a side stream, then runs the next ubatch."""
        side = self.streams.stream(Role.EXCHANGE)
        result = self.launch_beside(side, lambda: self.in_line(work), part)
        KeepAlive().cross(result, self.compute)
        return result

    def launch_in_two_steps(
        self, launch: Callable[[], Any], then: Callable[[Any], Any], part: UBatchGreenlet
    ) -> Any:
        """Launches the first collective of `part`, and the second in the next ubatch's turn."""
        second = _Postponed(part.index, self.events.take())

        def launch_first() -> None:
            counted = self.in_line(launch)
            second.work = lambda: then(counted)
            self.postponed.append(second)

        try:
            self.launch_beside(self.communication, launch_first, part)
            # No other ubatch has communicated since: this is the only one left.
            if not second.is_launched:
                self.launch_postponed(part.index)
        finally:
            if second.is_launched:
                self.compute.wait_event(second.after)  # as in `launch_beside`
        KeepAlive().cross(second.result, self.compute)
        return second.result

    def launch_beside(
        self, communication: Stream, launch: Callable[[], T], part: UBatchGreenlet
    ) -> T:
        """Launches the communication of `part` on that stream, then runs the next ubatch."""
        if self.postponed:
            self.launch_postponed(part.index)
        device, compute = self._device, self.compute
        before, after = self.events.take_pair()
        before.record(compute)
        communication.wait_event(before)
        device.set_stream(communication)
        try:
            try:
                result = launch()
            finally:
                device.set_stream(compute)
                after.record(communication)
            part.let_others_run()
        finally:
            # Also if the launch failed or this ubatch is unwound: the collective's memory returns
            # to the compute stream's pool, so that stream must be past the collective.
            compute.wait_event(after)
        return result
