"""A server that gets a signal while its engine runs a step longer than every limit."""

import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from vllm_davinci_testing.engines.server_process import SMALL, ServerProcess, processes_of_session
from vllm_davinci_testing.processes.waiting import becomes_true

# Each layer's attention takes the longest time that vnpu supports, so that steps take half a minute
# or more.
LONG_STEP = {"VNPU_PACE": "aclnnFusedInfer=10000000"}
REQUESTS = 4
# Time for a request to reach the engine.
REACHES_ENGINE_S = 2.0
# Limit of an end.
LIMIT_S = 60.0


@dataclass
class OpenRequest:
    """A request in its first step when the signal arrives."""

    is_stream: bool
    ended_at_s: float = float("inf")
    status: int = 0
    text: str = ""
    error: str = ""

    def send(self, server: ServerProcess, model: Path) -> None:
        body = {"model": str(model), "prompt": "def ", "max_tokens": 200, "stream": self.is_stream}
        try:
            with (
                httpx.Client(timeout=LIMIT_S) as client,
                client.stream("POST", f"{server.url}/v1/completions", json=body) as answer,
            ):
                self.status = answer.status_code
                self.text = "".join(answer.iter_text())
        except httpx.HTTPError as error:
            self.error = repr(error)
        self.ended_at_s = time.monotonic()


@dataclass
class SignalledServer:
    """server: a server that answers; sockets: directory of vLLM's sockets"""

    server: ServerProcess
    model: Path
    sockets: Path
    requests: list[OpenRequest] = field(default_factory=list)

    def open_requests(self) -> None:
        """Sends requests, every other one a stream; returns when a step runs them."""
        self.requests = [OpenRequest(is_stream=number % 2 == 0) for number in range(REQUESTS)]
        for request in self.requests:
            arguments = (self.server, self.model)
            threading.Thread(target=request.send, args=arguments, daemon=True).start()
        time.sleep(REACHES_ENGINE_S)

    def signal(self, number: signal.Signals, to_group: bool) -> float:
        """Signals the whole group, like a terminal, or only the server; returns the time."""
        pid = self.server.process.pid
        os.killpg(pid, number) if to_group else os.kill(pid, number)
        return time.monotonic()

    def wait_for_end(self) -> float:
        """Returns the time when the server's last process ended. Raises TimeoutError."""
        process, session = self.server.process, self.server.process.pid
        if not becomes_true(
            lambda: process.poll() is not None and not processes_of_session(session), LIMIT_S
        ):
            raise TimeoutError(f"{processes_of_session(session)} are left.\n{self.server.tail()}")
        return time.monotonic()


@contextmanager
def signalled_server(
    kind: type[ServerProcess], model: Path, folder: Path, *options: str
) -> Iterator[SignalledServer]:
    """Starts a small server, with its log in a folder; kills the server at the end."""
    with tempfile.TemporaryDirectory(prefix="vllm-") as sockets:  # paths of sockets must be short
        environment = {**LONG_STEP, "VLLM_RPC_BASE_PATH": sockets}
        server = kind(model, folder / "log.txt", *SMALL, *options, environment=environment)
        try:
            yield SignalledServer(server.wait_until_ready(), model, Path(sockets))
        finally:
            server.kill()
