"""Where ubatches take turns: the one call that everything makes that communicates."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Literal, Protocol

import greenlet
import torch._ops

from vllm_davinci.multistream.interleave import UBatchGreenlet

Where = Literal["communication", "exchange", "library"]


class Work(Protocol):
    """A collective under way, as torch.distributed gives it."""

    def wait(self) -> object:
        """Makes the current stream wait for it."""


# A greenlet must not be left while a C++ frame of a torch operator is on its stack: pybind11 would
# end the process. Operators implemented in Python are called by functions of this module.
_OPERATOR_MODULE = torch._ops.__dict__


def current_ubatch() -> int | None:
    """The index of the ubatch that is running, None outside of Interleave.run."""
    part = greenlet.getcurrent()
    return part.index if isinstance(part, UBatchGreenlet) else None


def communicate(
    launch: Callable[[], Any],
    on: Where = "communication",
    then: Callable[[Any], Any] | None = None,
    waits: bool = True,
) -> Any:
    """Communicates; inside a ubatch, the others compute meanwhile.

    launch: issues what communicates on the stream that is current when it is called
    on:     where that is
            "communication": one collective on the stream of that role. Tensors that it writes were
                allocated before, on the compute stream.
            "exchange": several collectives and what lies between them, on a stream of that role.
                `launch` calls `communicate` for each of them, and returns tensors, or tuples or
                lists of them.
            "library": one collective of torch.distributed on the library's own stream. `launch`
                begins it with async_op=True and returns its handle: half the events are enough.
    then:   a second collective whose sizes the first one brings to the host. It is given what
            `launch` returned, makes the host wait for it, and returns what an exchange may return.
            It is called in front of the others' next collective: the host waits while the device
            has their work to do, but not for it, and it does not queue up after it either.
    waits:  False only with "library": this ubatch goes on at once, and the caller waits for the
            handle before the results are used, and also while it is unwound; best after a later
            collective of this ubatch, by when it is done

    Tensors that are read or written must be held by the caller until this returns, or until its own
    wait: then no memory changes hands between streams. Returns what `launch` or `then` returns,
    None for a collective of the library. Outside of Interleave.run all of it runs in line. So it
    does inside of a torch operator that is implemented in Python, where a ubatch cannot yield;
    collectives are counted there.
    """
    part = greenlet.getcurrent()
    if not isinstance(part, UBatchGreenlet) or part.interleave.in_exchange:
        return _in_line(launch, on, then)
    if _inside_operator():
        if then is None and on != "exchange":  # whose own collectives are counted
            part.interleave.num_unswitched += 1
        return _in_line(launch, on, then)
    run = part.interleave
    if on == "library":  # the most frequent, so without a call of its own
        if run.postponed:
            run.launch_postponed(part.index)
        work: Work = launch()
        try:
            if waits:
                part.let_others_run()
        finally:
            if waits:
                work.wait()  # also while it is unwound: see Interleave.launch_beside
        return None
    if then is not None:
        return run.launch_in_two_steps(launch, then, part)
    if on == "communication":
        return run.launch_beside(run.communication, launch, part)
    return run.exchange_beside(launch, part)


def _in_line(launch: Callable[[], Any], on: Where, then: Callable[[Any], Any] | None) -> Any:
    result = launch()
    if on == "library":
        result.wait()
        return None
    return result if then is None else then(result)


def _inside_operator() -> bool:
    # Globals tell a module at less cost than the file's name; most of a hand-over is this walk.
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_globals is _OPERATOR_MODULE:
            return True
        frame = frame.f_back
    return False
