"""Times decode steps of one engine, eager and from graphs, with the requested adapters."""

import statistics
import time
from typing import Any

import torch
from vllm.lora.request import LoRARequest

from serving.decode_engine import decode_engine, decode_requests, replay_graphs, runner_of
from serving.decode_step_process import StepTimer


class WholeSteps:
    """Measures the thread's processor time per step, including inputs and outputs."""

    def __init__(self, runner: Any) -> None:
        self.seconds: list[float] = []
        execute, sample = runner.execute_model, runner.sample_tokens
        begin = 0.0

        def timed_execute(*args: Any, **kwargs: Any) -> Any:
            nonlocal begin
            begin = time.thread_time()
            return execute(*args, **kwargs)

        def timed_sample(*args: Any, **kwargs: Any) -> Any:
            output = sample(*args, **kwargs)
            self.seconds.append(time.thread_time() - begin)
            return output

        runner.execute_model, runner.sample_tokens = timed_execute, timed_sample

    def take(self) -> float:
        """Returns the median over the steps since the last call."""
        found = statistics.median(self.seconds)
        self.seconds.clear()
        return found


def measure(options: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    num_requests, num_steps = options["requests"], options["steps"]
    llm = decode_engine(options["model"], num_requests, async_scheduling=False, **options["engine"])
    runner = runner_of(llm)
    prompts, sampling = decode_requests(num_requests, num_steps)
    adapters = [
        LoRARequest(f"adapter{number}", number, path)
        for number, path in enumerate(options["adapters"], start=1)
    ]

    def generate(of_request: list[int]) -> dict[str, float]:
        """Generates; returns tokens per second, and per second of all threads' processor time."""
        asked = [of_request[row % len(of_request)] for row in range(num_requests)]
        chosen = [adapters[number - 1] if number else None for number in asked]
        begin, processor_begin = time.perf_counter(), time.process_time()
        if options["engine"]:
            llm.generate(prompts, sampling, lora_request=chosen, use_tqdm=False)
        else:
            llm.generate(prompts, sampling, use_tqdm=False)
        tokens = num_requests * num_steps
        return {
            "tokens_per_second": tokens / (time.perf_counter() - begin),
            "tokens_per_processor_second": tokens / (time.process_time() - processor_begin),
        }

    for of_request in options["cases"].values():
        generate(of_request)  # loads the adapters
    found: dict[str, list[dict[str, float]]] = {name: [] for name in options["cases"]}
    for _ in range(options["rounds"]):
        for name, of_request in options["cases"].items():
            found[name].append(generate(of_request))
    timer, steps = StepTimer(runner), WholeSteps(runner)
    for number in range(options["rounds"]):
        for name, of_request in options["cases"].items():
            for kind in ("graph", "eager"):
                replay_graphs(runner, kind == "graph")
                generate(of_request)
                of = timer.take()
                seconds = steps.take()
                if kind == "graph":
                    found[name][number]["graph_step_seconds"] = seconds
                else:
                    found[name][number] |= {"step_seconds": seconds, "launches": of["launches"]}
    return found
