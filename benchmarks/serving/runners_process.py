"""Times whole decode steps of one engine and counts their launches.

`python runners_process.py OPTIONS_JSON FD` answers one question at a time, so that engines on
vLLM's V1 and V2 runners can take turns.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
from decode_engine import decode_engine, decode_requests, runner_of
from vllm import LLM

from vllm_davinci.vnpu import _C


def answer(options: dict[str, Any], answers: int) -> None:
    """Answers the questions on standard input. answers: file descriptor for the answers"""
    llm = decode_engine(
        options["model"],
        max(options["batches"]),
        compilation_config={
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sorted(options["batches"]),
        },
    )
    runner = runner_of(llm)
    in_model = _counted_in_model(runner)
    with os.fdopen(answers, "w", buffering=1) as out:
        print(json.dumps("ready"), file=out)
        for line in sys.stdin:
            question = json.loads(line)
            _replay(runner, question["mode"] == "graph")
            print(json.dumps(_steps(llm, question["batch"], options["steps"], in_model)), file=out)


def _replay(runner: Any, from_graphs: bool) -> None:
    """Allows vLLM to replay graphs, or hides them."""
    if hasattr(runner, "cudagraph_manager"):
        runner.cudagraph_manager._graphs_captured = from_graphs
    else:
        runner.cudagraph_dispatcher.keys_initialized = from_graphs


def _counted_in_model(runner: Any) -> list[int]:
    """Counts launches of the model or of its graph, in the list's only element."""
    counted = [0]
    calls: tuple[tuple[Any, str], ...] = ((runner, "_model_forward"),)
    if hasattr(runner, "cudagraph_manager"):
        calls = (runner.model, "forward"), (runner.cudagraph_manager, "run_fullgraph")

    def counting(call: Callable[..., Any]) -> Callable[..., Any]:
        def launching(*args: Any, **kwargs: Any) -> Any:
            before = _C.host_counts()["launches"]
            output = call(*args, **kwargs)
            counted[0] += _C.host_counts()["launches"] - before
            return output

        return launching

    for owner, name in calls:
        setattr(owner, name, counting(getattr(owner, name)))
    return counted


def _steps(llm: LLM, batch: int, num_steps: int, in_model: list[int]) -> dict[str, float]:
    """Medians of the steps in which all requests decode.

    seconds: processor time of the thread; launches: outside the model; waits: for the device
    in_model: counts launches of the model
    """
    engine = llm.llm_engine
    prompts, sampling = decode_requests(batch, num_steps)
    for number, prompt in enumerate(prompts):
        engine.add_request(f"{time.monotonic_ns()}-{number}", prompt, sampling)
    seconds, launches, waits = [], [], []
    while engine.has_unfinished_requests():
        before, model_before, begin = _C.host_counts(), in_model[0], time.thread_time()
        engine.step()
        seconds.append(time.thread_time() - begin)
        after = _C.host_counts()
        model = in_model[0] - model_before
        launches.append(after["launches"] - before["launches"] - model)
        waits.append(after["synchronizations"] - before["synchronizations"])
    decodes = slice(3, -3)
    return {
        "seconds": statistics.median(seconds[decodes]),
        "launches": statistics.median(launches[decodes]),
        "waits": statistics.median(waits[decodes]),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    answer(json.loads(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)
