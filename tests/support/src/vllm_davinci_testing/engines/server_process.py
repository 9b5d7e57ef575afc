"""A real `vllm serve` process on a port of its own."""

from __future__ import annotations

import atexit
import http.client
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch

from vllm_davinci_testing.processes.fork_server import fork_context
from vllm_davinci_testing.processes.ranks import free_port
from vllm_davinci_testing.processes.waiting import becomes_true

VLLM_MODULE = "vllm.entrypoints.cli.main"
VLLM = (sys.executable, "-m", VLLM_MODULE)

# Limit of a server's start on a busy machine.
START_LIMIT_S = 300
# Limit of the end of vLLM's processes, in all cases.
END_LIMIT_S = 30

# Variables with which engines and workers are forked from the command's process and import nothing
# again. For tests of the command itself; other tests use vLLM's default, spawn.
FORKED_WORKERS = {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}

SMALL = (
    "--enforce-eager",
    "--dtype=float32",
    "--max-model-len=256",
    "--max-num-seqs=32",
    f"--kv-cache-memory-bytes={96 << 20}",
)


class ServerProcess:
    """Starts the server; `wait_until_ready` returns when it answers."""

    def __init__(
        self, model: Path, log: Path, *options: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self._model = str(model)
        arguments = ["serve", str(model), "--host=127.0.0.1", f"--port={self.port}", *options]
        self.process = self._start(arguments, {"OMP_NUM_THREADS": "1", **(environment or {})})

    def _start(self, arguments: list[str], environment: dict[str, str]) -> Any:
        """Starts the server in a new session; returns a Popen, or an object like it."""
        with self.log.open("wb") as file:
            return subprocess.Popen(
                self._command(arguments),
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    def _command(self, arguments: list[str]) -> list[str]:
        return [*VLLM, *arguments]

    def wait_until_ready(self) -> ServerProcess:
        if becomes_true(
            lambda: self.process.poll() is not None or answers(self.port), START_LIMIT_S
        ):
            if self.process.poll() is None:
                return self
            raise RuntimeError(
                f"vllm serve ended with {self.process.returncode} before it answered.\n"
                f"{self.tail()}"
            )
        self.kill()
        raise TimeoutError(f"vllm serve did not answer within {START_LIMIT_S} s.\n{self.tail()}")

    def complete(self, prompt: list[int], max_tokens: int) -> list[int]:
        """Continues a prompt greedily; thread-safe."""
        answer = httpx.post(
            f"{self.url}/v1/completions",
            json={
                "model": self._model,
                "prompt": prompt,
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            },
            timeout=START_LIMIT_S,
        )
        answer.raise_for_status()
        tokens: list[int] = answer.json()["choices"][0]["token_ids"]
        return tokens

    def processes(self) -> list[psutil.Process]:
        """Returns the server's processes: itself, engine cores and workers."""
        server = psutil.Process(self.process.pid)
        return [server, *server.children(recursive=True)]

    def interrupt(self) -> None:
        """Sends SIGINT to the whole group, like Ctrl-C in a terminal."""
        os.killpg(self.process.pid, signal.SIGINT)

    def wait_for_end(self) -> int:
        """Returns the exit status; raises TimeoutError if processes are left after END_LIMIT_S."""
        session = self.process.pid
        if not becomes_true(
            lambda: self.process.poll() is not None and not processes_of_session(session),
            END_LIMIT_S,
        ):
            left = processes_of_session(session)
            self.kill()
            raise TimeoutError(
                f"{left} of vllm serve are left after {END_LIMIT_S} s.\n{self.tail()}"
            )
        return self.process.returncode

    def kill(self) -> None:
        for process in processes_of_session(self.process.pid):
            process.kill()
        self.process.wait(10)

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def tail(self) -> str:
        return self.log_text()[-6000:]


class ForkedServer(ServerProcess):
    """A server whose processes are forked from one that has imported vLLM, so that it starts in
    seconds.

    For tests of results. ServerProcess is for tests of start, spawned engines and end, and for
    several API servers, because each imports prometheus_client differently.
    """

    def _start(self, arguments: list[str], environment: dict[str, str]) -> Any:
        forked = {**FORKED_WORKERS, **environment}
        process = fork_context().Process(target=_serve, args=(arguments, forked, self.log))
        process.start()
        return _ForkedProcess(process)


class _ForkedProcess:
    """The part of subprocess.Popen that ServerProcess needs."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, limit_s: float) -> None:
        self._process.join(limit_s)


def _serve(arguments: list[str], environment: dict[str, str], log: Path) -> None:
    os.setsid()
    os.environ.update(environment)
    torch.set_num_threads(1)  # torch has already read OMP_NUM_THREADS
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    from vllm.entrypoints.cli.main import main  # the fork server already has it

    sys.argv = ["vllm", *arguments]
    try:
        main()
    finally:
        # Ends like an interpreter, because multiprocessing's processes skip exit handlers. core's
        # exit handler sets the status of a server whose engine died.
        atexit._run_exitfuncs()


def answers(port: int, path: str = "/health") -> bool:
    """True if a server on this host answers a GET with 200.

    httpx reads the host's certificates for each client, which takes 40 ms of processor time: too
    much for polling a starting server.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def processes_of_session(session: int) -> list[psutil.Process]:
    """Returns all running processes of a session started with start_new_session."""
    found = []
    for process in psutil.process_iter(["status"]):
        try:
            ends = process.info["status"] == psutil.STATUS_ZOMBIE
            if not ends and os.getsid(process.pid) == session:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def shared_memory(processes: Iterable[psutil.Process]) -> set[Path]:
    """Returns the files in /dev/shm that these processes currently hold."""
    held: set[Path] = set()
    for process in processes:
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        held.update(Path(path) for path in re.findall(r"/dev/shm/\S+", maps))
        for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                held.update({descriptor.readlink()} & set(Path("/dev/shm").iterdir()))
    return {path for path in held if path.exists()}
