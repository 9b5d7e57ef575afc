"""Serves mixed requests for a long time, and checks the servers' memory and answers.

Run by `nox -s soak`; `-- --seconds N --requests N` sets the duration (whichever comes first).
Clients of two servers, one with adapters and one of an image model, sometimes disconnect or send
invalid requests. Prints a line per minute with counts and the servers' memory. Fails if an answer
differs from that to the request alone, a server ends, or memory grows by more than 1 % after the
first quarter of the time.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import torch
import transformers

from vllm_davinci.vnpu.environment_variables import VNPU_SOC
from vllm_davinci_testing.engines import adapters
from vllm_davinci_testing.engines.fault_engines import LLAMA, vision_checkpoint
from vllm_davinci_testing.engines.server_process import SMALL, ServerProcess, shared_memory
from vllm_davinci_testing.engines.soak_requests import Clients
from vllm_davinci_testing.plugin import EXACT_SOC

LINE_S = 60.0
# Permitted growth from the first quarter to the end.
MOST_GROWTH = 0.01
# The number of descriptors varies with clients' connections.
MORE_DESCRIPTORS = 24
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
WORKER = "vllm_davinci_testing.engines.memory_worker.MemoryWorker"


@dataclass(frozen=True)
class Held:
    """Sums of resources that the servers' processes hold."""

    device: int
    host: int
    shared: int
    descriptors: int

    def problems(self, before: Held) -> list[str]:
        """Describes resources that have grown beyond their limit."""
        told = [
            f"{name} memory has grown from {old} to {new} bytes"
            for name, old, new in (
                ("device", before.device, self.device),
                ("host", before.host, self.host),
                ("shared", before.shared, self.shared),
            )
            if new > old * (1 + MOST_GROWTH)
        ]
        if self.descriptors > before.descriptors + MORE_DESCRIPTORS:
            told.append(f"descriptors: {before.descriptors}, now {self.descriptors}")
        return told

    def __str__(self) -> str:
        return (
            f"device {self.device / 2**20:.1f} MiB, host {self.host / 2**20:.1f} MiB, "
            f"shared {self.shared / 2**20:.1f} MiB, {self.descriptors} descriptors"
        )


def held(servers: list[ServerProcess]) -> Held:
    """Sums private host memory; pages shared by processes count once, in `shared`."""
    device = host = descriptors = 0
    files: set[Path] = set()
    for server in servers:
        answer = httpx.post(
            f"{server.url}/collective_rpc", json={"method": "device_memory_bytes"}, timeout=60
        )
        device += sum(int(each) for each in answer.raise_for_status().json()["results"])
        for process in server.processes():
            with suppress(psutil.NoSuchProcess):
                host += process.memory_full_info().uss
                descriptors += process.num_fds()
                files |= shared_memory([process])
    return Held(device, host, sum(each.stat().st_blocks * 512 for each in files), descriptors)


def start(directory: Path, with_images: bool) -> list[ServerProcess]:
    """Starts the servers; returns when they answer."""
    network = transformers.AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32)
    modules = [
        f"adapter{seed}={adapters.write_adapter(network, directory / f'adapter{seed}', 8, seed)}"
        for seed in (1, 2)
    ]
    common = (*SMALL, "--served-model-name=base", f"--worker-extension-cls={WORKER}")
    # A chip with float32, because tokens are compared, and in 16 bits rounding may decide between
    # two.
    environment = {"VLLM_SERVER_DEV_MODE": "1", VNPU_SOC: f"{EXACT_SOC}:Ascend910B3"}
    with_adapters = ("--enable-lora", "--max-loras=2", "--lora-modules", *modules)
    servers = [
        ServerProcess(LLAMA, directory / "text", *common, *with_adapters, environment=environment)
    ]
    if with_images:
        template = f"--chat-template={TEMPLATE}"
        options = (*common, template, "--chat-template-content-format=string")
        servers.append(
            ServerProcess(
                vision_checkpoint(), directory / "images", *options, environment=environment
            )
        )
    for server in servers:
        server.wait_until_ready()
    return servers


def soak(options: argparse.Namespace, directory: Path) -> list[str]:
    """Prints lines to stdout; returns the problems."""
    servers = start(directory, not options.no_images)
    try:
        log = servers[0].log_text()
        problems = [
            f"the server does not say {words!r} at its start"
            for words in (r"server on http://127\.0\.0\.1:\d+", "Requests need no API key")
            if re.search(words, log) is None
        ]
        clients = Clients(servers[0].url, servers[1].url if len(servers) > 1 else "", options.seed)
        clients.learn()
        begin = time.monotonic()

        def goes_on() -> bool:
            late = time.monotonic() - begin >= options.seconds
            return not late and clients.tally.requests < options.requests

        threads = [
            threading.Thread(target=clients.send, args=(options.seed + each, goes_on))
            for each in range(1, options.clients + 1)
        ]
        for thread in threads:
            thread.start()
        before = None
        while any(thread.is_alive() for thread in threads):
            time.sleep(min(LINE_S, max(1.0, options.seconds / 8)))
            now = held(servers)
            seconds, tally = time.monotonic() - begin, clients.tally
            print(
                f"{seconds:5.0f} s: {tally.finished} right, {tally.aborted} aborted, "
                f"{tally.refused} refused, {len(tally.wrong)} wrong; {now}",
                flush=True,
            )
            is_warm = seconds > options.seconds / 4 or tally.requests > options.requests / 4
            if before is None and is_warm:
                before = now
        problems += held(servers).problems(before) if before is not None else []
        problems += clients.tally.wrong[:20]
        problems += [f"{each.log} has ended" for each in servers if each.process.poll() is not None]
        for server in servers:
            server.interrupt()
            if (status := server.wait_for_end()) not in (0, 130):
                problems.append(f"{server.log} ended with {status}: {server.tail()}")
        return problems
    finally:
        for server in servers:
            server.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3600.0, help="maximum duration")
    parser.add_argument("--requests", type=int, default=10**9, help="maximum number of requests")
    parser.add_argument("--clients", type=int, default=8, help="number of concurrent clients")
    parser.add_argument("--no-images", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        problems = soak(options, Path(directory))
    for problem in problems:
        print(f"PROBLEM: {problem}", flush=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
