"""Collectives of several devices, by size: results and times."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_davinci.meta.errors import VerificationError
from vllm_davinci.meta.verify.case import Case
from vllm_davinci.meta.verify.device import Device
from vllm_davinci.meta.verify.finding import Finding, Kind
from vllm_davinci.meta.verify.settings import Settings

LIMIT_S = 240.0
# Ranks of a virtual NPU are processes of this machine.
MOST_VIRTUAL_RANKS = 2


def cases(settings: Settings, directory: Path) -> Iterator[Case]:
    device = Device()
    ranks = min(device.torch.npu.device_count(), settings.ranks)
    if device.is_virtual:
        ranks = min(ranks, MOST_VIRTUAL_RANKS)
    if ranks < 2:
        told = f"{ranks} device: collectives need two"
        yield Case("collectives", lambda: [Finding("collectives", told, Kind.NOTE)])
        return
    yield Case("collectives", lambda: _of_ranks(ranks, device.has_times))


def _of_ranks(ranks: int, has_times: bool) -> Iterator[Finding]:
    answers = _run(ranks)
    yield Finding("collectives/ranks", ranks, Kind.NOTE)
    for name, found in answers.items():
        full = f"collectives/{name}"
        details = {"wrong on ranks": found["wrong"]} if found["wrong"] else {}
        right = "right" if not found["wrong"] else "wrong"
        yield Finding(f"{full}/result", right, passed=not found["wrong"], details=details)
        if has_times:
            microseconds = round(found["seconds"] * 1e6, 3)
            yield Finding(f"{full}/time of {ranks} ranks", microseconds, Kind.FIGURE, "us")


def _run(ranks: int) -> dict[str, Any]:
    """What rank 0 says. Raises VerificationError with a rank's last words."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    command = [sys.executable, "-m", "vllm_davinci.meta.verify.collective_process"]
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared["WORLD_SIZE"] = str(ranks)
    processes = [
        subprocess.Popen(
            command,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, (process, (_, errors)) in enumerate(zip(processes, outputs, strict=True)):
        if process.returncode != 0:
            words = "\n".join(errors.strip().splitlines()[-15:])
            raise VerificationError(f"rank {rank} ended with {process.returncode}:\n{words}")
    answer: dict[str, Any] = json.loads(outputs[0][0].splitlines()[-1])
    return answer
