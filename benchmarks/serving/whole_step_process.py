"""Times whole decode steps of one engine, and their forwards separately.

It runs in either side's environment and answers a question at a time, so that the sides can take
turns.
"""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from vllm import LLM, SamplingParams

from serving.decode_engine import runner_of, wrap_forwards

ON_NPU = hasattr(torch, "npu")


class Times(NamedTuple):
    """In seconds. wall: wall time; processor: processor time of all threads of this process"""

    wall: float
    processor: float

    @classmethod
    def now(cls) -> Times:
        return cls(time.perf_counter(), time.process_time())

    def since(self, begin: Times) -> Times:
        return Times(self.wall - begin.wall, self.processor - begin.processor)


class ForwardTimer:
    """Times the model's forward and logits, with a wait for the device before and after.

    The timer adds these waits: vLLM's CPU backend has none.
    """

    def __init__(self, runner: Any) -> None:
        self.total = Times(0.0, 0.0)
        model = runner.get_model()
        wrap_forwards(runner, self._timed)
        model.compute_logits = self._timed(model.compute_logits)

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = Times.now()
            _finish()
            output = function(*args, **kwargs)
            _finish()
            taken = Times.now().since(begin)
            self.total = Times(self.total.wall + taken.wall, self.total.processor + taken.processor)
            return output

        return timed


def _finish() -> None:
    if ON_NPU:
        torch.npu.synchronize()


def answerer(options: dict[str, Any]) -> Callable[[dict[str, Any]], Any]:
    torch.set_num_threads(1)
    llm = LLM(
        options["model"],
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=max(options["batches"]),
        max_num_batched_tokens=4096,
        kv_cache_memory_bytes=512 << 20,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        **options["engine"],
    )
    runner = runner_of(llm)
    timer = ForwardTimer(runner)

    def answer(question: dict[str, Any]) -> Any:
        batch = question["batch"]
        prompts = [{"prompt_token_ids": [5 + request % 40] * 4} for request in range(batch)]
        if question["profile"]:
            return _profile(llm, prompts, options)
        return _outside(llm, timer, prompts, options)

    return answer


def _outside(llm: LLM, timer: ForwardTimer, prompts: list[Any], options: dict[str, Any]) -> Times:
    """Returns the time per decode step outside the forward: long outputs minus short ones."""

    def run(tokens: int) -> Times:
        sampling = SamplingParams(
            max_tokens=tokens, ignore_eos=True, detokenize=False, **options["sampling"]
        )
        timer.total, begin = Times(0.0, 0.0), Times.now()
        llm.generate(prompts, sampling, use_tqdm=False)
        return Times.now().since(begin).since(timer.total)

    short = run(2)
    beyond = run(2 + options["steps"]).since(short)
    return Times(beyond.wall / options["steps"], beyond.processor / options["steps"])


def _profile(llm: LLM, prompts: list[Any], options: dict[str, Any]) -> list[tuple[str, float]]:
    """Returns the functions with the longest own time, in microseconds per step."""
    sampling = SamplingParams(
        max_tokens=options["steps"], ignore_eos=True, detokenize=False, **options["sampling"]
    )
    profile = cProfile.Profile()
    profile.runcall(llm.generate, prompts, sampling, use_tqdm=False)
    rows: dict[Any, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    own = sorted(rows.items(), key=lambda row: -row[1][2])[:30]
    return [
        (f"{Path(file).name}:{line}:{name}", values[2] / options["steps"] * 1e6)
        for (file, line, name), values in own
    ]
