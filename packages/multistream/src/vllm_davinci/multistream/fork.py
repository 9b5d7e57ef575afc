"""A side stream inside a layer: fork, run work concurrently with the main stream, join."""

from collections.abc import Callable
from typing import TypeVar

import torch

from vllm_davinci.multistream.device import Stream
from vllm_davinci.multistream.events import EventPool, hand_over
from vllm_davinci.multistream.lifetime import KeepAlive
from vllm_davinci.multistream.streams import Role, StreamPool

T = TypeVar("T")


class Fork:
    """Runs work of one layer on two streams.

    with Fork(pool, events, Role.VECTOR) as fork:
        kv = down_projection(x)
        key = fork.run(norm_and_rotate, kv)     # on the side stream, after what main launched
        query = up_projection(x)                    # on the main stream, beside it
        fork.join()                                 # main waits for the side stream
        attend(query, key)

    `stream` is the side stream, for operators that order work on both streams themselves.

    Tensors that cross between the streams are held until the join, after which the main stream is
    past every use of them. Leaving the block joins if necessary, also on an exception.
    """

    def __init__(self, streams: StreamPool, events: EventPool, role: Role) -> None:
        self._device = streams.device
        self._events = events
        self._main: Stream = streams.device.current_stream()
        self.stream = streams.stream(role)
        self._held = KeepAlive()
        self._open = False

    def __enter__(self) -> "Fork":
        return self

    def __exit__(self, *_: object) -> None:
        self.join()

    def run(self, work: Callable[..., T], *tensors: torch.Tensor | None) -> T:
        """Runs `work(*tensors)` on the side stream, after the main stream's earlier work."""
        hand_over(self._events.take(), self._main, self.stream)
        self._open = True
        self._held.hold(*tensors)
        self._device.set_stream(self.stream)
        try:
            result = work(*tensors)
        finally:
            self._device.set_stream(self._main)
        self._held.cross(result, self._main)
        return result

    def join(self) -> None:
        """Makes the main stream wait for everything that ran on the side stream."""
        if not self._open:
            return
        hand_over(self._events.take(), self.stream, self._main)
        self._open = False
        self._held.release()
