"""Runs parts of a benchmark in separate processes: engines, other settings or packages."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LINES_SHOWN = 30


def run_child(
    arguments: Sequence[str],
    limit_s: float,
    environment: Mapping[str, str] | None = None,
    python: Path | str = sys.executable,
) -> str:
    """Runs `python arguments` silently; raises RuntimeError with its last lines if it fails.

    Returns its output.
    environment: the child's variables; None: this process's
    """
    inherited = os.environ if environment is None else environment
    process = subprocess.run(
        [str(python), *arguments],
        env={**inherited, "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    if process.returncode:
        raise RuntimeError(
            f"{python} {' '.join(arguments[:3])} ended with status {process.returncode}. "
            "Its last lines:\n"
            + "\n".join((process.stdout + process.stderr).splitlines()[-LINES_SHOWN:])
        )
    return process.stdout


class AskedChild:
    """A child process that answers questions in order.

    Questions and answers are lines of JSON: questions on the child's standard input, answers on the
    file descriptor given by its last argument. Its first answer, before any question, says that it
    is ready.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        limit_s: float,
        environment: Mapping[str, str],
        python: Path | str = sys.executable,
    ) -> None:
        """limit_s: time limit for becoming ready, and for each answer"""
        self._limit_s = limit_s
        self._name = f"{python} {' '.join(arguments[:2])}"
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        answers, to_parent = os.pipe()
        self._process = subprocess.Popen(
            [str(python), *arguments, str(to_parent)],
            env={**environment, "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            text=True,
            pass_fds=[to_parent],
        )
        os.close(to_parent)
        self._answers = os.fdopen(answers, "rb", buffering=0)

    def __enter__(self) -> AskedChild:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(timeout=60)
        self._answers.close()
        self._log.close()

    def ask(self, question: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        """Reads the next answer. Raises RuntimeError with the child's last lines if none comes."""
        end, line = time.monotonic() + self._limit_s, b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self._answers], [], [], max(end - time.monotonic(), 0))
            read = self._answers.read(1 << 16) if ready else b""
            if not read:
                self._log.seek(0)
                raise RuntimeError(
                    f"{self._name} {'has ended' if ready else f'took over {self._limit_s:.0f} s'}. "
                    "Its last lines:\n" + "".join(self._log.readlines()[-LINES_SHOWN:])
                )
            line += read
        return json.loads(line)
