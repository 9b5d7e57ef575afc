"""`communicate`, which every communication calls: ubatches take turns there."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Literal, Protocol

import greenlet
import torch._ops

from vllm_davinci.multistream.interleave import UBatchGreenlet

Where = Literal["communication", "exchange", "library"]


class Work(Protocol):
    """A collective under way, as returned by torch.distributed."""

    def wait(self) -> object:
        """Makes the current stream wait for the collective."""


# A greenlet must not switch while a C++ frame of a torch operator is on its stack: pybind11 would
# end the process. Operators implemented in Python are called by functions of this module.
_OPERATOR_MODULE = torch._ops.__dict__


def current_ubatch() -> int | None:
    """Index of the running ubatch, None outside Interleave.run."""
    part = greenlet.getcurrent()
    return part.index if isinstance(part, UBatchGreenlet) else None


def communicate(
    launch: Callable[[], Any],
    on: Where = "communication",
    then: Callable[[Any], Any] | None = None,
    waits: bool = True,
) -> Any:
    """Communicates; inside a ubatch, the other ubatches compute meanwhile.

    launch: launches the communication on the stream that is current at its call
    on:     the stream
            "communication": one collective on the stream of that role. The tensors that it writes
                were allocated on the compute stream.
            "exchange": several collectives and the work between them, on the stream of that role.
                `launch` calls `communicate` for each, and returns tensors, or tuples or lists of
                them.
            "library": one collective of torch.distributed on the library's own stream. `launch`
                starts it with async_op=True and returns its handle, which takes half the events.
    then:   a second collective whose sizes come from the first. It takes the result of `launch`,
            makes the host wait for it, and returns the same kinds of result as an exchange. It is
            called before the next collective of another ubatch, so that the device computes during
            the host's wait, which does not include that work.
    waits:  False only with "library": this ubatch continues at once, and the caller waits for the
            handle before using the results, also when unwound; best after a later collective of
            this ubatch, by which time it is done

    The caller must hold tensors that are read or written until this returns, or until its own wait,
    so that no memory changes streams. Returns the result of `launch` or `then`, None for a
    collective of the library. Runs in line outside Interleave.run, and inside a torch operator
    implemented in Python, where a ubatch cannot yield; such collectives are counted.
    """
    part = greenlet.getcurrent()
    if not isinstance(part, UBatchGreenlet) or part.interleave.in_exchange:
        return _in_line(launch, on, then)
    if _inside_operator():
        if then is None and on != "exchange":  # its collectives are counted
            part.interleave.num_unswitched += 1
        return _in_line(launch, on, then)
    run = part.interleave
    if on == "library":  # the most frequent case, so without a call of its own
        if run.postponed:
            run.launch_postponed(part.index)
        work: Work = launch()
        try:
            if waits:
                part.let_others_run()
        finally:
            if waits:
                work.wait()  # also when unwound: see Interleave.launch_beside
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
    # Compares globals, not file names: this walk takes most of a hand-over's time.
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_globals is _OPERATOR_MODULE:
            return True
        frame = frame.f_back
    return False
