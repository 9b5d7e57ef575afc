"""After a process is killed or interrupted, the whole engine ends in time and leaves nothing
behind.
"""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from vllm_davinci_testing.engines.ended_process import assert_ended
from vllm_davinci_testing.engines.server_process import (
    END_LIMIT_S,
    FORKED_WORKERS,
    SMALL,
    START_LIMIT_S,
    ForkedServer,
    ServerProcess,
    processes_of_session,
    shared_memory,
)
from vllm_davinci_testing.engines.signalled_server import LONG_STEP
from vllm_davinci_testing.processes.forked import run_alone
from vllm_davinci_testing.processes.waiting import becomes_true


@pytest.mark.parametrize(
    "kind", [ForkedServer, pytest.param(ServerProcess, marks=pytest.mark.thorough)]
)
def test_a_killed_worker_fails_the_requests_and_ends_the_server(kind, tiny_llama, tmp_path):
    server = kind(
        tiny_llama,
        tmp_path / "log.txt",
        *SMALL,
        "--tensor-parallel-size=2",
        # Slow, so that the worker is killed during the requests.
        environment={"VNPU_PACE": "all_reduce=5000"},
    )
    try:
        server.wait_until_ready()
        processes = server.processes()
        held = shared_memory(processes)
        assert held, "The workers' queues are in shared memory"
        workers = [process for process in processes if "Worker_TP" in " ".join(process.cmdline())]
        assert len(workers) == 2

        def ask(_: int) -> int:
            body = {
                "model": str(tiny_llama),
                "prompt": "def ",
                "max_tokens": 250,
                "ignore_eos": True,
                "temperature": 1.0,
            }
            return httpx.post(f"{server.url}/v1/completions", json=body, timeout=90).status_code

        with ThreadPoolExecutor(4) as threads:
            answers = [threads.submit(ask, n) for n in range(4)]
            assert becomes_true(lambda: requests_running(server) == 4, END_LIMIT_S), server.tail()
            workers[-1].kill()
            assert {answer.result() for answer in answers} == {500}
        assert server.wait_for_end() == 1
        left = [path for path in held if path.exists()]
        if kind is ForkedServer:
            # multiprocessing's semaphores remain: the tracker frees them when it ends, and forks
            # share the fork server's, which continues.
            for path in left:
                path.unlink()
        else:
            assert not left
    finally:
        server.kill()


def requests_running(server: ServerProcess) -> int:
    text = httpx.get(f"{server.url}/metrics", timeout=30).text
    values = re.findall(r"^vllm:num_requests_running\{.*\} (\S+)$", text, re.MULTILINE)
    return sum(int(float(value)) for value in values)


KILLED = """
    import sys, threading
    import psutil
    from vllm import LLM, SamplingParams
    from vllm.v1.engine.exceptions import EngineDeadError

    def kill_engine():
        (engine,) = [
            each
            for each in psutil.Process().children(recursive=True)
            if each.name().startswith("VLLM::Engine")
        ]
        print("moment: killing", flush=True)
        engine.kill()

    for _ in range(2):
        llm = LLM({model!r}, enforce_eager=True, max_model_len=256, kv_cache_memory_bytes=1 << 26)
        threading.Timer(1.0, kill_engine).start()
        try:
            llm.generate("def ", SamplingParams(max_tokens=250, ignore_eos=True))
        except EngineDeadError:
            print("moment: told", flush=True)
    sys.exit(3)
"""


@pytest.mark.nightly("faults")
def test_a_program_learns_that_its_engines_were_killed(tiny_llama: Path):
    ended = run_alone(
        KILLED.format(model=str(tiny_llama)),
        VNPU_PACE="aclnn=1000",  # slow, so that the engine is killed before an answer
        VLLM_LOGGING_LEVEL="WARNING",
        **FORKED_WORKERS,
    )
    said = [line for line in ended.stdout.splitlines() if line.startswith("moment: ")]
    assert said == ["moment: killing", "moment: told"] * 2, ended.stderr[-2000:]
    assert ended.status == 3


ABANDONED = """
    import os, signal
    import psutil
    from vllm import LLM

    llm = LLM(
        {model!r}, enforce_eager=True, max_model_len=256, kv_cache_memory_bytes=1 << 26,
        tensor_parallel_size={ranks},
    )
    print("started", *[each.pid for each in psutil.Process().children(recursive=True)], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.nightly("faults")
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_an_engine_whose_program_was_killed_ends(ranks: int, tiny_llama: Path):
    ended = run_alone(ABANDONED.format(model=str(tiny_llama), ranks=ranks), **FORKED_WORKERS)
    assert ended.status == -signal.SIGKILL, ended.output[-4000:]
    (line,) = re.findall(r"^started (.+)$", ended.stdout, re.MULTILINE)
    started = [int(pid) for pid in line.split()]
    assert len(started) >= ranks
    assert_ended([psutil.Process(pid) for pid in started if psutil.pid_exists(pid)])


CONFIGURING = "moment: imported"
# Python drops an interrupt that arrives in a finalizer, which is common during imports: press
# Ctrl-C again, as users do.
ONE_MORE_S = 10.0
INTERRUPTED = """
    import sys
    from vllm import LLM, SamplingParams

    if __name__ == "__main__":
        print("moment: imported", flush=True)
        llm = LLM(sys.argv[1], enforce_eager=True, max_model_len=256, max_num_seqs=32)
        print("moment: generating", flush=True)
        sampling = SamplingParams(max_tokens=250, ignore_eos=True)
        while True:
            llm.generate(["def "] * 32, sampling)
"""


@pytest.mark.nightly("faults")
@pytest.mark.parametrize(
    ("moment", "delay_s", "environment"),
    [
        pytest.param(CONFIGURING, 0.0, {}, id="configuring"),
        pytest.param(
            "Initializing a V1 LLM engine", 0.5, {}, id="starting", marks=pytest.mark.thorough
        ),
        pytest.param(
            "Loading weights took", 0.1, FORKED_WORKERS, id="loading", marks=pytest.mark.thorough
        ),
        pytest.param(
            "moment: generating", 1.0, {**FORKED_WORKERS, **LONG_STEP}, id="in_a_long_step"
        ),
    ],
)
def test_an_interrupt_ends_everything(moment, delay_s, environment, tiny_llama, tmp_path):
    program, log = tmp_path / "program.py", tmp_path / "log.txt"
    program.write_text(textwrap.dedent(INTERRUPTED))
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, str(program), str(tiny_llama)],
            env={**os.environ, **environment},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    session = process.pid

    def says(text: str) -> bool:
        return text in log.read_text(errors="replace")

    def has_ended() -> bool:
        return process.poll() is not None and not processes_of_session(session)

    try:
        reached = becomes_true(lambda: says(moment) or process.poll() is not None, START_LIMIT_S)
        assert reached and process.poll() is None, log.read_text()[-6000:]
        time.sleep(delay_s)
        main = psutil.Process(session)
        held = shared_memory([main, *main.children(recursive=True)])
        os.killpg(session, signal.SIGINT)
        if moment == CONFIGURING and not becomes_true(has_ended, ONE_MORE_S):
            os.killpg(session, signal.SIGINT)
        ended = becomes_true(has_ended, END_LIMIT_S)
        assert ended, f"{processes_of_session(session)} are left.\n{log.read_text()[-6000:]}"
        assert process.returncode in (1, 130, -signal.SIGINT), log.read_text()[-6000:]
        assert says("KeyboardInterrupt")
        assert not [path for path in held if path.exists()]
    finally:
        for left in processes_of_session(session):
            left.kill()
        process.wait(10)
