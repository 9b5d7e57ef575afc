"""Runs the forwards of several ubatches in turn on one thread.

Each forward is ordinary Python that calls collectives. It runs in a greenlet of its own; a
collective is the only place where it yields:

    before = compute stream so far
    communication stream: waits for `before`, runs the collective, marks `after`
    -> the next ubatch runs, and launches its work on the compute stream
    compute stream: waits for `after`; the first ubatch goes on

So one stream computes, the other communicates, and the order of launches is the same on every rank.

A collective whose sizes another one brings to the host goes in two steps (`sized_exchange`): the
host learns them while the next ubatch's work runs, and launches it in front of that one's own.
"""

import contextvars
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol, TypeVar

import greenlet
import torch._ops

from vllm_davinci.multistream.device import Event, Stream
from vllm_davinci.multistream.errors import MultistreamError
from vllm_davinci.multistream.events import EventPool
from vllm_davinci.multistream.lifetime import KeepAlive
from vllm_davinci.multistream.streams import Role, StreamPool

T = TypeVar("T")
C = TypeVar("C")

logger = logging.getLogger(__name__)

# A greenlet must not be left while a C++ frame of a torch operator is on its stack: pybind11 would
# end the process. Operators implemented in Python are called by functions of this module.
_OPERATOR_MODULE = torch._ops.__dict__


class Work(Protocol):
    """A collective under way, as torch.distributed gives it."""

    def wait(self) -> object:
        """Makes the current stream wait for it."""


class _Abort(greenlet.GreenletExit):
    """Thrown into the other ubatches when one failed; unwinds their frames."""


@dataclass
class _Postponed:
    """The second half of a `sized_exchange`.

    index: the ubatch that it belongs to; after: marks its end on the communication stream
    """

    index: int
    after: Event
    work: Callable[[], Any] = lambda: None
    result: Any = None
    is_launched: bool = False


class _UBatchGreenlet(greenlet.greenlet):
    """A greenlet that knows its run: no module-level state is needed to find it.

    following: whose turn is next; itself when no other has work left
    """

    following: "_UBatchGreenlet"

    def __init__(self, body: Callable[[], None], run: "Interleave", index: int) -> None:
        super().__init__(body, greenlet.getcurrent())
        self.interleave = run
        self.index = index

    def let_others_run(self) -> None:
        """Comes back when it is this one's turn again."""
        run = self.interleave
        if run.is_aborting:  # a ubatch that caught its end, or communicates while it unwinds
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
        self._live: list[_UBatchGreenlet] = []
        self.postponed: list[_Postponed] = []
        self.compute: Stream = streams.device.current_stream()
        self.communication = self.compute
        self.num_switches = 0  # of the newest run
        self.num_unswitched = 0  # collectives of the newest run that could not yield
        self.on_switch: Callable[[int], None] | None = None
        self.in_exchange = False
        self.is_deferring = False
        self.is_aborting = False

    def run(
        self,
        forwards: Sequence[Callable[[], T]],
        on_switch: Callable[[int], None] | None = None,
    ) -> list[T]:
        """Runs all forwards to their end; their results in order.

        on_switch: called with a ubatch's index each time it starts, goes on or is unwound

        The first forward to raise ends the run: the others are unwound at the collective they wait
        in, and that one error is raised. No greenlet is left behind.
        """
        if self._live:
            raise MultistreamError("this Interleave is running already; one run at a time.")
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
            # It comes back here when any ubatch ends.
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
    ) -> _UBatchGreenlet:
        def body() -> None:
            try:
                if self.on_switch is not None:
                    self.on_switch(index)
                results[index] = forward()
            finally:
                self._leave_turns(self._live[index])

        part = _UBatchGreenlet(body, self, index)
        part.gr_context = contextvars.copy_context()  # a greenlet's own context starts empty
        return part

    def _leave_turns(self, part: _UBatchGreenlet) -> None:
        for other in self._live:
            if other.following is part:
                other.following = part.following

    def _abort(self) -> None:
        """Unwinds the ubatches that still wait in a collective, each whatever another does."""
        self.is_aborting = True
        self.postponed.clear()
        try:
            for part in self._live:
                if not part.dead and part:  # not yet started ones have nothing to unwind
                    try:
                        part.throw(_Abort("another ubatch of this step failed"))
                    except Exception:
                        logger.exception(
                            "Ubatch %d failed while it was unwound, because another had "
                            "failed. That one's error is the one to look at.",
                            part.index,
                        )
        finally:
            self.is_aborting = False

    def launch_postponed(self, index: int) -> None:
        """Launches what ubatches have postponed, in their order, while `index` runs."""
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
        """Runs work whose collectives are launched where they are called."""
        self.in_exchange = True
        try:
            return work()
        finally:
            self.in_exchange = False

    def launch_beside(
        self, communication: Stream, launch: Callable[[], T], part: _UBatchGreenlet
    ) -> T:
        """Launches what `part` communicates on that stream, then lets the next ubatch run."""
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
            # Also when the launch failed or this ubatch is being unwound: memory that the
            # collective uses is given back to the compute stream's pool, so that stream must be
            # past the collective.
            compute.wait_event(after)
        return result


def current_ubatch() -> int | None:
    """The index of the ubatch that is running, None outside of Interleave.run."""
    part = greenlet.getcurrent()
    return part.index if isinstance(part, _UBatchGreenlet) else None


def communicate(launch: Callable[[], T]) -> T:
    """Runs a collective; inside a ubatch, the others compute meanwhile.

    launch: issues the collective on the stream that is current when it is called. Tensors that it
    writes must have been allocated before, on the compute stream, and its tensors must be held by
    the caller until this returns: then no memory changes hands between streams.
    Outside of Interleave.run it just calls `launch`. Inside of a torch operator that is implemented
    in Python the ubatch cannot yield: the collective runs in line and is counted.
    """
    part = greenlet.getcurrent()
    if not isinstance(part, _UBatchGreenlet) or part.interleave.in_exchange:
        return launch()
    if _inside_operator():
        part.interleave.num_unswitched += 1
        return launch()
    run = part.interleave
    return run.launch_beside(run.communication, launch, part)


def collective(begin: Callable[[], Work]) -> None:
    """Runs a collective of torch.distributed; inside a ubatch, the others compute meanwhile.

    begin: begins it after the current stream's work, with async_op=True, and returns its handle.
    The library's stream does the communication: half the events of `communicate` are enough.
    The same holds about tensors, and about torch operators that are implemented in Python.
    """
    part = greenlet.getcurrent()
    if not isinstance(part, _UBatchGreenlet) or part.interleave.in_exchange:
        begin().wait()
    elif _inside_operator():
        part.interleave.num_unswitched += 1
        begin().wait()
    else:
        if part.interleave.postponed:
            part.interleave.launch_postponed(part.index)
        work = begin()
        if part.interleave.is_deferring:
            return  # whoever defers it waits
        try:
            part.let_others_run()
        finally:
            work.wait()  # also while it is unwound: see Interleave


def deferred(launch: Callable[[], T]) -> T:
    """Begins collectives whose results are wanted later: this ubatch goes on beside them.

    launch: calls `collective`, whose handles the caller keeps. It waits for them before their
            results are used, and also while it is unwound; best after a later collective of this
            ubatch, by when they are done. Outside of Interleave.run they are waited for at once.
    """
    part = greenlet.getcurrent()
    if not isinstance(part, _UBatchGreenlet):
        return launch()
    run = part.interleave
    run.is_deferring = True
    try:
        return launch()
    finally:
        run.is_deferring = False


def exchange(work: Callable[[], T]) -> T:
    """Runs collectives and what lies between them; inside a ubatch, the others compute
    meanwhile, beside all of it.

    work: calls `collective` or `communicate` once or several times. It runs on a side stream, which
    is not the compute stream. What it reads must be held by the caller until this returns; it
    returns tensors, or tuples or lists of them. Torch operators that are implemented in Python: as
    with `communicate`.
    """
    part = greenlet.getcurrent()
    if not isinstance(part, _UBatchGreenlet) or part.interleave.in_exchange:
        return work()
    if _inside_operator():
        return work()  # whose collectives are counted
    run = part.interleave
    result = run.launch_beside(run.streams.stream(Role.EXCHANGE), lambda: run.in_line(work), part)
    KeepAlive().cross(result, run.compute)
    return result


def sized_exchange(count: Callable[[], C], move: Callable[[C], T]) -> T:
    """Runs two collectives, of which the second has sizes that the first one tells the host.

    count: issues the first, on the communication stream, and what brings the sizes to the host
    move:  is given what `count` returned, makes the host wait for it, and issues the second there;
           returns what `exchange` may return
    Inside a ubatch the others run after `count`. `move` is called in front of their next
    collective: the host waits while the device has their work to do, but not for it, and the second
    collective does not queue up after it either. What both read must be held by the caller until
    this returns. Torch operators that are implemented in Python: as with `communicate`.
    """
    part = greenlet.getcurrent()
    if not isinstance(part, _UBatchGreenlet) or part.interleave.in_exchange:
        return move(count())
    if _inside_operator():
        return move(count())  # whose collectives are counted
    run = part.interleave
    second = _Postponed(part.index, run.events.take())

    def launch() -> None:
        counted = run.in_line(count)
        second.work = lambda: move(counted)
        run.postponed.append(second)

    try:
        run.launch_beside(run.communication, launch, part)
        if not second.is_launched:  # nobody else has communicated since: it is the only one
            run.launch_postponed(part.index)
    finally:
        if second.is_launched:
            run.compute.wait_event(second.after)  # as in launch_beside
    KeepAlive().cross(second.result, run.compute)
    result: T = second.result
    return result


def _inside_operator() -> bool:
    # Globals tell a module at less cost than the file's name; most of a hand-over is this walk.
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_globals is _OPERATOR_MODULE:
            return True
        frame = frame.f_back
    return False
