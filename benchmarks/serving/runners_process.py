"""One engine whose decode steps are timed as a whole, and whose launches are counted.

`python runners_process.py OPTIONS_JSON FD` answers a question at a time, so that two engines, on
vLLM's V1 and V2 runner, can take turns.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
from decode_engine import decode_engine, decode_requests
from vllm import LLM

from vllm_davinci.vnpu import _C


def answer(options: dict[str, Any], answers: int) -> None:
    """Answers the questions of standard input. answers: file descriptor for what was measured"""
    llm = decode_engine(
        options["model"],
        max(options["batches"]),
        compilation_config={
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sorted(options["batches"]),
        },
    )
    worker = llm.llm_engine.model_executor.driver_worker
    runner = worker.worker.model_runner if hasattr(worker, "worker") else worker.model_runner
    with os.fdopen(answers, "w", buffering=1) as out:
        print(json.dumps("ready"), file=out)
        for line in sys.stdin:
            question = json.loads(line)
            _replay(runner, question["mode"] == "graph")
            print(json.dumps(_steps(llm, question["batch"], options["steps"])), file=out)


def _replay(runner: Any, from_graphs: bool) -> None:
    """Has vLLM choose graphs, or answers it that there are none."""
    if hasattr(runner, "cudagraph_manager"):
        runner.cudagraph_manager._graphs_captured = from_graphs
    else:
        runner.cudagraph_dispatcher.keys_initialized = from_graphs


def _steps(llm: LLM, batch: int, num_steps: int) -> dict[str, float]:
    """Medians of the steps in which all requests decode: seconds of the thread, launches."""
    engine = llm.llm_engine
    prompts, sampling = decode_requests(batch, num_steps)
    for number, prompt in enumerate(prompts):
        engine.add_request(f"{time.monotonic_ns()}-{number}", prompt, sampling)
    seconds, launches = [], []
    while engine.has_unfinished_requests():
        before, begin = _C.host_counts()["launches"], time.thread_time()
        engine.step()
        seconds.append(time.thread_time() - begin)
        launches.append(_C.host_counts()["launches"] - before)
    decodes = slice(3, -3)
    return {
        "seconds": statistics.median(seconds[decodes]),
        "launches": statistics.median(launches[decodes]),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    answer(json.loads(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)
