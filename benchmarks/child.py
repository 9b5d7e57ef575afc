"""Runs parts of a benchmark in separate processes: engines, other settings or packages.

A part is a module below this folder with `measure(options)`, or with `answerer(options)`, which
returns a function from questions to answers; all of them are JSON. Its process runs this file:
`python child.py MODULE OPTIONS_JSON FD`, and writes lines to the file descriptor FD.
"""

from __future__ import annotations

import importlib
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
QUIET = {"VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}


def run_child(arguments: Sequence[str], limit_s: float) -> str:
    """Runs `python arguments` silently; raises RuntimeError with its last lines if it fails.

    Returns its output.
    """
    process = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **QUIET},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    if process.returncode:
        raise RuntimeError(
            f"{' '.join(arguments[:3])} ended with status {process.returncode}. Its last lines:\n"
            + "\n".join((process.stdout + process.stderr).splitlines()[-LINES_SHOWN:])
        )
    return process.stdout


class AskedChild:
    """A process of a part, which answers questions in order.

    Questions are lines on its standard input. Its first answer, before any question, is what it has
    measured, or means that it is ready.
    """

    def __init__(
        self,
        module: str,
        options: Any,
        limit_s: float,
        more: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        python: Path | str = sys.executable,
    ) -> None:
        """
        limit_s:     time limit for becoming ready, and for each answer
        more:        variables beside those of the environment
        environment: None: this process's
        """
        self._limit_s, self._module = limit_s, module
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        answers, to_parent = os.pipe()
        inherited = os.environ if environment is None else environment
        self._process = subprocess.Popen(
            [str(python), __file__, module, json.dumps(options), str(to_parent)],
            env={**inherited, **QUIET, **(more or {})},
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
                if ready:
                    self.wait_for_end()  # which writes its error
                self._log.seek(0)
                raise RuntimeError(
                    f"{self._module} {'has ended' if ready else f'took over {self._limit_s:.0f} s'}"
                    ". Its last lines:\n" + "".join(self._log.readlines()[-LINES_SHOWN:])
                )
            line += read
        return json.loads(line)

    def wait_for_end(self) -> None:
        """Waits until the process has ended by itself."""
        self._process.wait(self._limit_s)


def measured(*arguments: Any, is_killed: bool = True, **options: Any) -> Any:
    """Returns what a part measures in its own process. Takes the arguments of AskedChild.

    is_killed: False: the process ends by itself, after it has written traces or ended an engine
    """
    with AskedChild(*arguments, **options) as child:
        found = child.answer()
        if not is_killed:
            child.wait_for_end()
        return found


def answer(module: str, options: str, answers: str) -> None:
    part = importlib.import_module(module)
    with os.fdopen(int(answers), "w", buffering=1) as out:
        if hasattr(part, "measure"):
            print(json.dumps(part.measure(json.loads(options))), file=out)
        else:
            answer_to = part.answerer(json.loads(options))
            print(json.dumps("ready"), file=out)
            for line in sys.stdin:
                print(json.dumps(answer_to(json.loads(line))), file=out)


if __name__ == "__main__":
    answer(*sys.argv[1:])
