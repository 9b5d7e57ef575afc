"""Runs decode steps on two ranks whole and as two ubatches, captured and eager."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from serving.decode_engine import decode_engine, decode_requests, replay_graphs, wrap_forwards

SPLIT = {"enabled": True, "decode": True, "min_decode_tokens_to_split": 2}


class StepTimingWorker:
    """Mixed into the worker by vLLM's option worker_extension_cls.

    Measures processor time of the thread that prepares, launches (TASK_QUEUE_ENABLE=0) and samples
    a step. Excludes the virtual device's threads, and waits for the device or the other rank.
    """

    model_runner: Any

    def time_steps(self) -> None:
        """Starts timing steps."""
        runner = self.model_runner
        self.steps: list[float] = []
        self.forwards: list[float] = []
        execute, sample = runner.execute_model, runner.sample_tokens

        def timed(forward: Callable[..., Any]) -> Callable[..., Any]:
            def timed_forward(*args: Any, **kwargs: Any) -> Any:
                begin = time.thread_time()
                output = forward(*args, **kwargs)
                self.forwards.append(time.thread_time() - begin)
                return output

            return timed_forward

        def timed_execute(*args: Any, **kwargs: Any) -> Any:
            # While it waits, a host thread runs the virtual device's tasks.
            torch.npu.synchronize()
            begin = time.thread_time()
            output = execute(*args, **kwargs)
            self.steps.append(time.thread_time() - begin)
            return output

        def timed_sample(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time()
            output = sample(*args, **kwargs)
            self.steps[-1] += time.thread_time() - begin
            return output

        wrap_forwards(runner, timed)
        runner.execute_model, runner.sample_tokens = timed_execute, timed_sample

    def taken_times(self) -> tuple[float, float]:
        """Returns medians since the last call, in seconds: of a step, and of its model forward."""
        found = statistics.median(self.steps), statistics.median(self.forwards)
        self.steps.clear()
        self.forwards.clear()
        return found

    def split_decodes(self, is_split: bool) -> None:
        """Switches the split on or off, and captures graphs again."""
        runner = self.model_runner
        runner.splitter._decisions.revise(decode=is_split)
        runner.splitter._graph_decisions.clear()
        sizes = list(runner.compilation_config.cudagraph_capture_sizes)
        runner.graphs.destroy()
        runner.graphs.use_sizes(sizes)
        runner.capture_model()
        self.forwards.clear()  # do not count captures as steps

    def replay_steps(self, are_replayed: bool) -> None:
        """Makes steps replay graphs or run eagerly."""
        replay_graphs(self.model_runner, are_replayed)


def measure(options: dict[str, Any]) -> dict[str, Any]:
    num_requests = options["requests"]
    llm = decode_engine(
        options["model"],
        num_requests,
        load_format="dummy",
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        worker_extension_cls=f"{__name__}.{StepTimingWorker.__name__}",
        additional_config={"dbo": SPLIT},
    )
    prompts, sampling = decode_requests(num_requests, options["steps"])
    llm.collective_rpc("time_steps")
    found: dict[str, list[Any]] = {}
    for number in range(options["rounds"] + 1):
        for step in ("whole", "split"):
            llm.collective_rpc("replay_steps", args=(True,))
            llm.collective_rpc("split_decodes", args=(step == "split",))
            for kind in ("graph", "eager"):
                llm.collective_rpc("replay_steps", args=(kind == "graph",))
                llm.generate(prompts, sampling, use_tqdm=False)
                times = llm.collective_rpc("taken_times")
                if number:  # the first round warms up
                    found.setdefault(f"{kind} {step}", []).append(times)
    return found
