"""Runs a module in a process for each rank of a group."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from vllm_davinci.verify.errors import VerificationError

LAST_LINES = 20
ANSWER = "verify answers: "
"""Prefix of the line with rank 0's answer, in JSON."""


def answer_of_ranks(module: Sequence[str], ranks: int, limit_s: float) -> dict[str, Any]:
    """Runs `python -m MODULE ...` once per rank; returns rank 0's answer.

    Several processes get RANK, WORLD_SIZE and an address; all end within `limit_s` seconds. Raises
    VerificationError with a rank's last lines if one fails, times out, or answers nothing.
    """
    with ExitStack() as stack:
        logs = [
            stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8"))
            for _ in range(ranks)
        ]
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", *module],
                env={**os.environ, **variables},
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
            for log, variables in zip(logs, _variables(ranks), strict=True)
        ]
        end = time.monotonic() + limit_s
        try:
            statuses = [_wait(process, end) for process in processes]
        finally:
            for process in processes:
                process.kill()
        outputs = []
        for log in logs:
            log.seek(0)
            outputs.append(log.read())
    return _answer(module[0], statuses, outputs)


def _variables(ranks: int) -> list[dict[str, str]]:
    """Environment variables of each rank; none for a single one."""
    if ranks == 1:
        return [{}]
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    group |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return [{**group, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def _wait(process: subprocess.Popen[bytes], end: float) -> int | None:
    """Waits for a process; returns its exit status, or None on timeout."""
    try:
        return process.wait(timeout=max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


def _answer(module: str, statuses: list[int | None], outputs: list[str]) -> dict[str, Any]:
    for rank, (status, output) in enumerate(zip(statuses, outputs, strict=True)):
        if status != 0:
            how = "was late and ended" if status is None else f"ended with {status}"
            raise VerificationError(f"rank {rank} of {module} {how}:\n{_last_words(output)}")
    for line in reversed(outputs[0].splitlines()):
        if line.startswith(ANSWER):
            answer: dict[str, Any] = json.loads(line.removeprefix(ANSWER))
            return answer
    raise VerificationError(f"{module} has answered nothing:\n{_last_words(outputs[0])}")


def _last_words(output: str) -> str:
    return "\n".join(output.strip().splitlines()[-LAST_LINES:])
