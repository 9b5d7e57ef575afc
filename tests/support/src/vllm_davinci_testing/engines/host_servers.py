"""`vllm serve` on test hosts, and a client on one of them.

The client runs on a host, because nothing outside reaches the hosts' network.
"""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_davinci_testing.engines.server_process import FORKED_WORKERS, SMALL, START_LIMIT_S, VLLM
from vllm_davinci_testing.processes.hosts import Host
from vllm_davinci_testing.processes.waiting import becomes_true

PORT = 8000

# Waits for the server, sends all requests together, and prints each result; prints "STARTED" when
# each request has a token.
CLIENT = """
import json, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import httpx

url, model, prompts, max_tokens, limit_s = json.loads(sys.argv[1])
client = httpx.Client(base_url=url, timeout=limit_s, trust_env=False)
begun = threading.Barrier(len(prompts), lambda: print("STARTED", flush=True))

def is_ready():
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False

def complete(prompt):
    body = dict(model=model, prompt=prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True,
                logprobs=0, return_token_ids=True, stream=True)
    answer = {"tokens": [], "logprobs": [], "error": ""}
    with client.stream("POST", "/v1/completions", json=body) as lines:
        for line in lines.iter_lines():
            if not line.startswith("data: {"):
                answer["error"] += "" if lines.status_code == 200 else line
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                answer["error"] += event["error"]["message"]
                continue
            choice = event["choices"][0]
            is_first = choice["token_ids"] and not answer["tokens"]  # there are events without
            answer["tokens"] += choice["token_ids"]
            answer["logprobs"] += choice["logprobs"]["token_logprobs"]
            if is_first:
                begun.wait(limit_s)
    return answer

deadline = time.monotonic() + limit_s
while not is_ready() and time.monotonic() < deadline:
    time.sleep(0.2)
with ThreadPoolExecutor(len(prompts)) as threads:
    answers = list(threads.map(complete, prompts))
print("ANSWERS", json.dumps(answers), flush=True)
try:
    print("METRICS", json.dumps(client.get("/metrics").text), flush=True)
except httpx.TransportError:
    pass  # a server whose engine died has ended
"""


@dataclass
class HostServer:
    """A `vllm serve` on a host."""

    host: Host
    model: Path
    log: Path
    process: subprocess.Popen[bytes]

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def tail(self) -> str:
        return self.log_text()[-6000:]


@dataclass
class HostClient:
    """A client on the server's host that sends all requests at once."""

    server: HostServer
    output: Path
    process: subprocess.Popen[bytes]

    def has_begun(self) -> bool:
        """True if every request has its first token."""
        return "STARTED" in self.output.read_text(errors="replace")

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def answers(self) -> list[dict[str, Any]]:
        """Returns each request's tokens, logprobs, and error or ""."""
        answers: list[dict[str, Any]] = self._printed("ANSWERS")
        return answers

    def served(self) -> dict[str, int]:
        """Returns the number of requests that each DP rank has served."""
        counter = r'vllm:request_success_total\{engine="(\d+)",[^\n]*\} ([\d.]+)'
        counts: dict[str, int] = {}
        for engine, count in re.findall(counter, self._printed("METRICS")):
            counts[engine] = counts.get(engine, 0) + int(float(count))
        return counts

    def _printed(self, name: str) -> Any:
        text = self.output.read_text(errors="replace")
        lines = [line for line in text.splitlines() if line.startswith(f"{name} ")]
        assert lines, f"{text[-4000:]}\n{self.server.tail()}"
        return json.loads(lines[0].removeprefix(f"{name} "))


def serve_on(
    host: Host, model: Path, folder: Path, *options: str, **environment: str
) -> HostServer:
    """Starts a small server on a host; its log in the folder is named after the host."""
    log = folder / f"{host.name}.txt"
    of_host = {**FORKED_WORKERS, "VLLM_HOST_IP": host.address, "OMP_NUM_THREADS": "1"}
    command = [*VLLM, "serve", str(model), f"--port={PORT}", *SMALL, *options]
    return HostServer(host, model, log, host.start(command, {**of_host, **environment}, log))


def ask(server: HostServer, prompts: Sequence[list[int]], max_tokens: int) -> HostClient:
    """Starts a client that requests a greedy continuation of each prompt."""
    output = server.log.with_suffix(".client.txt")
    url = f"http://{server.host.address}:{PORT}"
    asked = json.dumps([url, str(server.model), list(prompts), max_tokens, START_LIMIT_S])
    process = server.host.start([sys.executable, "-c", CLIENT, asked], {}, output)
    return HostClient(server, output, process)


def wait_for(
    clients: Sequence[HostClient], servers: Sequence[HostServer], limit_s: float = START_LIMIT_S
) -> None:
    """Waits until the clients have ended; fails if a server ends earlier, or at the time limit."""

    def is_over() -> bool:
        for server in servers:
            assert server.process.poll() is None, server.tail()
        return all(client.has_ended() for client in clients)

    assert becomes_true(is_over, limit_s), "\n".join(server.tail() for server in servers)
