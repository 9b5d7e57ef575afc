"""Overlap decisions on their way from the workers to the server's metrics endpoint.

vLLM's worker output has no room for them, so each replica's first worker sends its counts as a
datagram to the front end on the same host. The address is a name in Linux's abstract socket
namespace, which leaves no file and ends with the process. Counts are totals: a lost datagram is
made good by the next one.
"""

import contextlib
import hashlib
import json
import os
import socket
from functools import cache
from typing import Any

from prometheus_client import Counter
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from vllm_davinci.core.config import get_config
from vllm_davinci.core.log import init_logger
from vllm_davinci.core.overlap.decisions import Counts
from vllm_davinci.core.platform import NPUPlatform

logger = init_logger(__name__)

MAX_DATAGRAM_BYTES = 4096  # a dozen reasons of 20 characters with their counts


def _address(vllm_config: VllmConfig) -> str:
    """The same in all processes of one server.

    Several API servers each make a configuration of their own, with an identity of its own; what
    they share is the directory that vLLM chose for their metrics.
    """
    shared = os.environ.get("PROMETHEUS_MULTIPROC_DIR") or vllm_config.instance_id
    return f"\0vllm-davinci-overlap-{hashlib.sha256(shared.encode()).hexdigest()[:32]}"


class CountSender:
    """A worker's end. Never waits, and does nothing while nobody listens."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._address = _address(vllm_config)
        self._engine = vllm_config.parallel_config.data_parallel_index
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def __call__(self, counts: Counts) -> None:
        message = json.dumps({"engine": self._engine, "counts": counts}).encode()
        with contextlib.suppress(BlockingIOError, ConnectionRefusedError):
            self._socket.sendto(message, self._address)


class CountReceiver:
    """The front end's end."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(_address(vllm_config))

    def received(self) -> dict[int, Counts]:
        """The newest counts of each replica that sent any since the last call."""
        newest: dict[int, Counts] = {}
        with contextlib.suppress(BlockingIOError):
            while True:
                message = json.loads(self._socket.recv(MAX_DATAGRAM_BYTES))
                newest[message["engine"]] = message["counts"]
        return newest


@cache
def _counter() -> Counter:
    # Not "vllm:...": vLLM unregisters metrics with its name when an engine starts.
    return Counter(
        "davinci:overlap_decisions",
        "Steps by the reason why they were split into micro-batches or were not.",
        labelnames=["engine", "reason"],
    )


class OverlapStatLogger(AggregateStatLoggerBase):
    """Counts overlap decisions in the server's metrics. vLLM finds it by its entry point."""

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int]) -> None:
        self._counted: dict[tuple[int, str], int] = {}
        self._receiver: CountReceiver | None = None
        if not isinstance(current_platform, NPUPlatform):
            return  # installed beside another platform
        if not get_config(vllm_config).dbo.enabled:
            return
        try:
            self._receiver = CountReceiver(vllm_config)
        except OSError as error:  # another API server process of this engine has it
            logger.debug("Overlap decisions are counted by another front end: %s", error)

    def record(self, *args: Any, **kwargs: Any) -> None:
        """Called by vLLM after every step."""
        if self._receiver is None:
            return
        for engine, counts in self._receiver.received().items():
            for reason, count in counts.items():
                before = self._counted.get((engine, reason), 0)
                if count > before:
                    _counter().labels(str(engine), reason).inc(count - before)
                    self._counted[engine, reason] = count

    def log_engine_initialized(self) -> None:
        """Nothing to say."""
