"""One stream per role and device, created once: a stream per layer would exhaust the device."""

import enum
from collections.abc import Callable

from vllm_davinci.multistream.device import Device, Stream, current_device


class Role(enum.Enum):
    """The purpose of a stream. COMPUTE is the caller's current stream, which is never created
    here.
    """

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    VECTOR = "vector"  # element-wise work beside matrix products
    SHARED_EXPERT = "shared expert"
    PREFETCH = "prefetch"  # weight prefetches into the cache
    EXCHANGE = "exchange"  # collectives and the work between them
    COPY = "copy"


class StreamPool:
    """Streams by role; a role always has the same stream.

    device: device of the streams; None: the current one
    on_new: called with each stream when it is created
    """

    def __init__(
        self, device: Device | None = None, on_new: Callable[[Role, Stream], None] | None = None
    ) -> None:
        self.device = device if device is not None else current_device()
        self._streams: dict[Role, Stream] = {}
        self._on_new = on_new

    def stream(self, role: Role) -> Stream:
        """The stream of a role; for COMPUTE the current stream."""
        if role is Role.COMPUTE:
            return self.device.current_stream()
        stream = self._streams.get(role)
        if stream is None:
            stream = self._streams[role] = self.device.new_stream()
            if self._on_new is not None:
                self._on_new(role, stream)
        return stream

    @property
    def created(self) -> int:
        """Number of created streams, at most one per role."""
        return len(self._streams)
