"""Overlap decisions on their way from the workers to the server's metrics endpoint.

vLLM's worker output has no room for them, so the first worker of each DP rank sends its counts to
the front end on the same host. The address is a name in Linux's abstract socket namespace, which
leaves no file and ends with the process. Counts are totals: a lost message is made good by the
next one.
"""

import hashlib
import json
import os
import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from typing import Any, cast

from prometheus_client import Counter
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from vllm_davinci.core.config.parsing import get_config, is_resolved
from vllm_davinci.core.log import init_logger
from vllm_davinci.core.ubatch.decisions import Counts

logger = init_logger(__name__)

MAX_MESSAGE_BYTES = 4096  # a dozen reasons of 20 characters with their counts
CLOSE_LIMIT_S = 10


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
        self._socket: socket.socket | None = None

    def __call__(self, counts: Counts) -> None:
        message = json.dumps({"engine": self._engine, "counts": counts}).encode()
        try:
            if self._socket is None:
                self._socket = self._connected()
            self._socket.send(message)
        except BlockingIOError:
            pass  # the front end is far behind: the totals of a later step tell it all
        except ConnectionError:  # it does not listen yet, or has ended
            self.close()

    def close(self) -> None:
        """A later call connects again."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connected(self) -> socket.socket:
        connection = _new_socket()
        connection.setblocking(False)
        try:
            connection.connect(self._address)
        except OSError:
            connection.close()
            raise
        return connection


class CountReceiver:
    """The front end's end: a thread of its own, so that counts arrive whatever else goes on there.

    on_counts: called in that thread with a DP rank and its counts
    Raises OSError when another front end has the address.
    """

    def __init__(self, vllm_config: VllmConfig, on_counts: Callable[[int, Counts], None]) -> None:
        self._on_counts = on_counts
        self._listener = _new_socket()
        try:
            self._listener.bind(_address(vllm_config))
        except OSError:
            self._listener.close()
            raise
        self._listener.listen()
        self._thread = threading.Thread(target=self._receive, name="overlap counts", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(CLOSE_LIMIT_S)
        if self._thread.is_alive():
            logger.warning(
                "Waited %d s for the thread that receives overlap counts to end; it is left to the "
                "end of the process.",
                CLOSE_LIMIT_S,
            )
        self._listener.close()

    def _receive(self) -> None:
        with selectors.DefaultSelector() as ready, ExitStack() as workers:
            ready.register(self._listener, selectors.EVENT_READ)
            while True:
                for key, _ in ready.select():
                    if key.fileobj is self._listener:
                        try:
                            worker = workers.enter_context(self._listener.accept()[0])
                        except OSError:
                            return  # closed
                        ready.register(worker, selectors.EVENT_READ)
                        continue
                    worker = cast(socket.socket, key.fileobj)
                    message = _message_of(worker)
                    if not message:
                        ready.unregister(worker)
                        worker.close()
                        continue
                    try:
                        content = json.loads(message)
                        self._on_counts(content["engine"], content["counts"])
                    except (AttributeError, LookupError, TypeError, ValueError) as error:
                        logger.warning_once("Overlap counts that cannot be read: %s", repr(error))


def _message_of(worker: socket.socket) -> bytes:
    """The next one; empty when the worker has ended."""
    try:
        return worker.recv(MAX_MESSAGE_BYTES)
    except ConnectionError:
        return b""


def _new_socket() -> socket.socket:
    """Keeps messages apart, and in order; its buffer holds those of thousands of steps."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@cache
def _counter() -> Counter:
    # Not "vllm:...": vLLM unregisters metrics with its name when an engine starts.
    return Counter(
        "davinci:overlap_decisions",
        "Steps by the reason why they were split into ubatches or were not.",
        labelnames=["engine", "reason"],
    )


class OverlapStatLogger(AggregateStatLoggerBase):
    """Counts overlap decisions in the server's metrics. vLLM finds it by its entry point."""

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int]) -> None:
        self._counted: dict[tuple[int, str], int] = {}
        self._receiver: CountReceiver | None = None
        if not is_resolved(vllm_config):
            return  # installed beside another platform
        if not get_config(vllm_config).dbo.enabled:
            return
        try:
            self._receiver = CountReceiver(vllm_config, self._count)
        except OSError as error:  # another API server process of this engine has it
            logger.debug("Overlap decisions are counted by another front end: %s", error)

    def _count(self, engine: int, counts: Counts) -> None:
        for reason, count in counts.items():
            before = self._counted.get((engine, reason), 0)
            if count > before:
                _counter().labels(str(engine), reason).inc(count - before)
                self._counted[engine, reason] = count

    def record(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: vLLM calls this in front ends that have requests, and counts come to one.

        Which of several API servers has the counts and which one gets a request is chance.
        """

    def log_engine_initialized(self) -> None:
        """Nothing to say."""
