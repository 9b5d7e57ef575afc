"""Continues prompts on one engine with or without drafts: speed, steps, launches."""

import time
from typing import Any

import torch
from vllm import SamplingParams

from serving.decode_engine import decode_engine, runner_of
from vllm_davinci.vnpu import _C


class StepCount:
    """Counts a runner's steps, and the host's launches in them."""

    def __init__(self, runner: Any) -> None:
        self.steps = 0
        execute = runner.execute_model

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.steps += 1
            return execute(*args, **kwargs)

        runner.execute_model = counted

    def now(self) -> tuple[int, int]:
        return self.steps, _C.host_counts()["launches"]


def measure(options: dict[str, Any]) -> dict[str, list[dict[str, float]]]:
    torch.set_num_threads(1)
    most = max(options["requests"])
    engine: dict[str, Any] = {
        "skip_tokenizer_init": False,
        "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"},
    }
    if options["speculative"] is not None:
        engine["speculative_config"] = options["speculative"]
    llm = decode_engine(options["model"], most, **engine)
    runner = runner_of(llm)
    count = StepCount(runner)
    sampling = SamplingParams(temperature=0, max_tokens=options["tokens"], ignore_eos=True)

    def generate(num_requests: int) -> dict[str, float]:
        prompts = [f"def read_{n}(self):\n    " for n in range(num_requests)]
        before, begin = count.now(), time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begin
        pairs = zip(count.now(), before, strict=True)
        steps, launches = (now - then for now, then in pairs)
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        return {
            "tokens_per_second": tokens / seconds,
            "tokens_per_step": tokens / num_requests / steps,
            "launches_per_step": launches / steps,
        }

    generate(most)  # warms up
    return {
        str(number): [generate(number) for _ in range(options["rounds"])]
        for number in options["requests"]
    }
