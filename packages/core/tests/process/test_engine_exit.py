"""How processes end: an engine's own, and those of the program that uses it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_davinci.core.process import engine_exit

PROGRAM = """
import gc
import importlib.util
import multiprocessing
import os
import signal
import sys

import tqdm

# Alone: importing core imports vLLM, which takes seconds in every process.
spec = importlib.util.spec_from_file_location("engine_exit", sys.argv[1])
engine_exit = importlib.util.module_from_spec(spec)
spec.loader.exec_module(engine_exit)


class Cycle:
    def __init__(self):
        self.itself = self

    def __del__(self, write=os.write):  # globals are gone by then
        write(1, b"collected ")


def killed():
    engine_exit.keep_no_semaphore()
    engine_exit.keep_no_semaphore()
    for step in tqdm.tqdm(range(2)):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def end():
    signal.signal(signal.SIGTERM, lambda number, frame: os.write(1, b"told "))
    if "lists" in sys.argv:
        sys.modules[engine_exit.LISTS_WHAT_IS_LEFT] = sys
    sys.modules["__main__"].kept = Cycle()
    gc.freeze()
    if "program" not in sys.argv:
        gc.unfreeze()  # as vLLM does for an engine; a server's heap stays frozen
    engine_exit.settle_heap_at_exit()
    engine_exit.settle_heap_at_exit()
    engine_exit.finish_teardown()
    os.kill(os.getpid(), signal.SIGTERM)
    os.write(1, b"survived ")


if __name__ == "__main__":
    if "program" not in sys.argv:
        process = multiprocessing.get_context("spawn").Process(
            target=killed if "killed" in sys.argv else end, name=sys.argv[2]
        )
        process.start()
        process.join(60)
        sys.exit(process.exitcode)
    end()
"""


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        (["EngineCore"], "survived "),
        (["EngineCore_DP1", "lists"], "survived collected "),
        (["VllmWorker-1"], "survived "),
        (["program"], "told survived "),
        (["program", "lists"], "told survived collected "),
        (["Process-1"], "told survived collected "),
    ],
)
def test_a_process_ends_whole_and_collects_what_would_be_listed(
    arguments: list[str], seen: str, tmp_path: Path
):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program), engine_exit.__file__, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, seen), done.stderr


@pytest.mark.parametrize(
    ("name", "leaks"), [("EngineCore", False), ("VllmWorker-1", False), ("Process-1", True)]
)
def test_an_engine_that_a_signal_ends_leaves_no_semaphore(name: str, leaks: bool, tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program), engine_exit.__file__, name, "killed"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 256 - signal.SIGTERM, done.stderr  # of a child that a signal ended
    assert "2/2" in done.stderr
    assert ("leaked semaphore" in done.stderr) is leaks
