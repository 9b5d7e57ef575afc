"""One engine on two ranks whose decode steps run whole and as two ubatches, captured and eager.

`python split_step_process.py OPTIONS_JSON` writes what it found to the file that the options name.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

SPLIT = {"enabled": True, "decode": True, "min_decode_tokens_to_split": 2}


class StepTimingWorker:
    """Mixed into the worker by vLLM's option worker_extension_cls.

    Times a step's model from the call of its forward until all of it is launched, or replayed.
    """

    model_runner: Any

    def time_steps(self) -> None:
        """From now on."""
        self.wall: list[float] = []
        self.processor: list[float] = []
        forward = self.model_runner._model_forward

        def timed(*args: Any, **kwargs: Any) -> Any:
            _synchronize()
            processor, wall = time.process_time(), time.perf_counter()
            output = forward(*args, **kwargs)
            _synchronize()
            self.wall.append(time.perf_counter() - wall)
            self.processor.append(time.process_time() - processor)
            return output

        self.model_runner._model_forward = timed

    def taken_times(self) -> tuple[float, float]:
        """Medians since the last call, in seconds: of the clock, and of this process's threads."""
        found = statistics.median(self.wall), statistics.median(self.processor)
        self.wall.clear()
        self.processor.clear()
        return found

    def split_decodes(self, is_split: bool) -> None:
        """From now on, or not any more; graphs are captured again."""
        runner = self.model_runner
        runner._decisions._policy.decode = is_split
        runner._graph_decisions.clear()
        runner.model.clear_graphs()
        runner.capture_model()

    def replay_steps(self, are_replayed: bool) -> None:
        """Or run eagerly: without keys vLLM's dispatcher answers that no graph holds a step."""
        self.model_runner.cudagraph_dispatcher.keys_initialized = are_replayed


def _synchronize() -> None:
    import torch

    torch.npu.synchronize()


def measure(options: dict[str, Any]) -> dict[str, Any]:
    from decode_engine import decode_engine, decode_requests

    num_requests = options["requests"]
    llm = decode_engine(
        options["model"],
        num_requests,
        load_format="dummy",
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        worker_extension_cls="split_step_process.StepTimingWorker",
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


if __name__ == "__main__":
    chosen = json.loads(sys.argv[1])
    Path(chosen["result"]).write_text(json.dumps(measure(chosen)), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)
