"""Times decode steps of one engine on the host, alternately replayed from graphs and eager."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from serving.decode_engine import (
    decode_engine,
    decode_requests,
    replay_graphs,
    runner_of,
    wrap_forwards,
)
from vllm_davinci.vnpu import _C


class StepTimer:
    """Times the host's work for the model's forward in each step of a runner.

    Measures processor time of the launching thread (TASK_QUEUE_ENABLE=0) and wall time. A virtual
    device replays in a thread of its own, which may take the host thread's core.
    """

    def __init__(self, runner: Any) -> None:
        self.seconds: list[float] = []
        self.elapsed: list[float] = []
        self.launches: list[int] = []
        wrap_forwards(runner, self._timed)

    def _timed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            torch.npu.synchronize()
            launches = _C.host_counts()["launches"]
            began, begin = time.perf_counter(), time.thread_time()
            output = forward(*args, **kwargs)
            self.seconds.append(time.thread_time() - begin)
            self.elapsed.append(time.perf_counter() - began)
            torch.npu.synchronize()
            self.launches.append(_C.host_counts()["launches"] - launches)
            return output

        return timed

    def take(self) -> dict[str, float]:
        """Returns medians over the steps since the last call, in seconds."""
        lists = {"seconds": self.seconds, "elapsed": self.elapsed, "launches": self.launches}
        found = {name: statistics.median(values) for name, values in lists.items()}
        for values in lists.values():
            values.clear()
        return found


def measure(options: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    num_requests = options["requests"]
    llm = decode_engine(
        options["model"],
        num_requests,
        load_format=options["load_format"],
        additional_config=options["additional_config"],
    )
    runner = runner_of(llm)
    prompts, sampling = decode_requests(num_requests, options["steps"])
    timer = StepTimer(runner)
    found: dict[str, list[dict[str, float]]] = {"graph": [], "eager": []}
    for _ in range(options["rounds"]):
        for name, rounds in found.items():
            replay_graphs(runner, name == "graph")
            llm.generate(prompts, sampling, use_tqdm=False)
            rounds.append(timer.take())
    assert sum(runner.graphs.replays().values()) >= options["rounds"] * (options["steps"] - 2)
    return {
        name: {key: [each[key] for each in rounds] for key in rounds[0]}
        for name, rounds in found.items()
    }
