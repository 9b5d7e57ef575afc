"""Any stopped rank is named in time, and the engine ends without it."""

import re
import time
from typing import Any

import httpx
import psutil
import pytest
from vllm import SamplingParams

from vllm_davinci_testing.engines.ended_process import assert_ended
from vllm_davinci_testing.engines.engine_process import EngineError
from vllm_davinci_testing.engines.graph_settings import decode_graphs
from vllm_davinci_testing.engines.server_process import SMALL, ForkedServer

pytestmark = pytest.mark.nightly("faults")

MODEL = "llama_head64_gqa4"
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
GRAPHS = decode_graphs(2, 4)
PIPELINE = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


def assert_names_the_stopped(told: str, rank: int, stopped: psutil.Process) -> None:
    """Asserts that the error names rank, process, host, event, waiting time, and the setting to
    change.
    """
    process = rf"process of rank {rank} \(pid {stopped.pid} on host \S+\) is stopped"
    # A collective reports the rank or, if no rank waits in one, the watch for stopped processes.
    wait = (
        rf"(waited \d+ s in \w+ #\d+ of group \S+ for rank {rank} \(pid {stopped.pid}\)"
        r"|call \d+ of its worker has waited \d+ s for it)\. .*a longer wait: [A-Z_]+=SECONDS"
    )
    for named in (process, wait):
        assert re.search(named, told, re.IGNORECASE), told[-8000:]


@pytest.mark.thorough
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "options",
    [{"async_scheduling": True}, {"async_scheduling": False}, GRAPHS, PIPELINE],
    ids=["asynchronous", "synchronous", "graphs", "pipeline"],
)
def test_a_stopped_rank_is_named_before_vllm_gives_up(options, rank, zoo, start_engine, prompts):
    limit_s = 40
    engine = start_engine(
        zoo(MODEL),
        environment={"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(limit_s)},
        **{**TWO_RANKS, **options},
    )
    _, *workers = engine.processes()
    name = re.compile(rf"Worker_[TP]P{rank}")
    stopped = next(each for each in workers if name.search(" ".join(each.cmdline())))
    stopped.suspend()
    begin = time.monotonic()
    with pytest.raises(EngineError) as error:
        engine.generate([{"prompt_token_ids": each} for each in prompts[:4]], GREEDY)
    assert time.monotonic() - begin < limit_s
    assert_names_the_stopped(f"{error.value}{engine.log_text()}", rank, stopped)
    engine.close()
    assert_ended(workers)


def test_a_server_whose_first_rank_is_stopped_names_it_and_ends_with_a_status(tiny_llama, tmp_path):
    limit_s = 25
    server = ForkedServer(
        tiny_llama,
        tmp_path / "log.txt",
        *SMALL,
        "--tensor-parallel-size=2",
        environment={"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(limit_s)},
    ).wait_until_ready()
    try:
        right = server.complete([1, 2, 3], 4)
        (pid,) = set(re.findall(r"Worker_TP0 pid=(\d+)", server.log_text()))
        stopped = psutil.Process(int(pid))
        stopped.suspend()  # this rank replies to vLLM, which gets no further reply
        stopped.resume()
        assert server.complete([1, 2, 3], 4) == right
        stopped.suspend()
        begin = time.monotonic()
        body = {"model": str(tiny_llama), "prompt": "def ", "max_tokens": 4}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=90)
        assert time.monotonic() - begin < limit_s
        assert answer.status_code == 500
        assert_names_the_stopped(answer.text, 0, stopped)
        assert server.wait_for_end() == 1
        with pytest.raises(psutil.NoSuchProcess):
            stopped.resume()
    finally:
        server.kill()
