"""Processes of an engine, and of the program that uses it, end cleanly."""

import signal
import sys
from pathlib import Path

import pytest

from vllm_davinci.core.process import engine_exit
from vllm_davinci_testing.processes.programs import run_to_end

PROGRAM = """
import atexit
import gc
import importlib.util
import multiprocessing
import os
import signal
import sys
import threading
import time

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
    engine_exit.leave_at_exit()
    engine_exit.leave_at_exit()
    engine_exit.finish_teardown()
    os.kill(os.getpid(), signal.SIGTERM)
    if sys.argv[2].startswith(engine_exit.WORKER):
        engine_exit.leave_interrupts_to_engine()
        os.kill(os.getpid(), signal.SIGINT)
    os.write(1, b"survived ")
    atexit.register(os.write, 1, b"handled ")
    threading.Thread(target=lambda: (time.sleep(0.2), os.write(1, b"joined "))).start()
    if "signalled" in sys.argv:
        atexit.register(engine_exit.leave_after_exit_handlers)
    if "status" in sys.argv:
        sys.exit(int(sys.argv[-1]))
    if "fails" in sys.argv:
        raise ValueError("of a step")
    if "prompt" in sys.argv:
        sys.ps1 = ">>> "  # as where a prompt follows
    if "interrupted" in sys.argv:
        raise KeyboardInterrupt


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
    ("arguments", "seen", "status"),
    [
        (["EngineCore"], "survived joined handled ", 0),
        (["EngineCore_DP1", "lists", "status", "3"], "survived joined handled ", 3),
        (["VllmWorker-1", "fails"], "survived joined handled collected ", 1),
        (["program"], "told survived joined handled ", 0),
        (["program", "lists"], "told survived joined handled collected ", 0),
        (["program", "lists", "signalled"], "told survived joined handled ", 0),
        (["program", "lists", "signalled", "fails"], "told survived joined handled ", 1),
        (["program", "lists", "interrupted"], "told survived joined handled ", -signal.SIGINT),
        (
            ["program", "lists", "prompt", "interrupted"],
            "told survived joined handled collected ",
            -signal.SIGINT,
        ),
        (["Process-1"], "told survived joined handled collected ", 0),
    ],
)
def test_a_process_ends_completely_and_an_engine_skips_the_final_collection(
    arguments: list[str], seen: str, status: int, tmp_path: Path
):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = run_to_end([sys.executable, str(program), engine_exit.__file__, *arguments])
    assert (done.returncode, done.stdout) == (status, seen), done.stderr
    assert ("ValueError: of a step" in done.stderr) is ("fails" in arguments)
    assert ("KeyboardInterrupt" in done.stderr) is ("interrupted" in arguments)


@pytest.mark.parametrize(
    ("name", "leaks"), [("EngineCore", False), ("VllmWorker-1", False), ("Process-1", True)]
)
def test_an_engine_that_a_signal_ends_leaves_no_semaphore(name: str, leaks: bool, tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = run_to_end([sys.executable, str(program), engine_exit.__file__, name, "killed"])
    # Status of a child ended by a signal.
    assert done.returncode == 256 - signal.SIGTERM, done.stderr
    assert "2/2" in done.stderr
    assert ("leaked semaphore" in done.stderr) is leaks
