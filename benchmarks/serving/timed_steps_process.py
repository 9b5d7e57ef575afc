"""Times one engine's steps, one batch per question, so that two engines can take turns."""

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
from vllm import LLM, SamplingParams

from serving.generation import engine_arguments, prompts


def answerer(options: dict[str, Any]) -> Callable[[None], dict[str, list[float]]]:
    torch.set_num_threads(1)
    llm, numbers = LLM(**engine_arguments(options)), itertools.count()
    return lambda _: _steps_of_batch(llm, next(numbers), options)


def _steps_of_batch(llm: LLM, number: int, options: dict[str, Any]) -> dict[str, list[float]]:
    """Returns each step's seconds: wall time, and processor time of all threads."""
    engine = llm.llm_engine
    sampling = SamplingParams(temperature=0, max_tokens=options["output_tokens"], ignore_eos=True)
    for request, prompt in enumerate(prompts(options)):
        engine.add_request(f"{number}-{request}", prompt, sampling)
    elapsed, processor = [], []
    while engine.has_unfinished_requests():
        begin, processor_begin = time.perf_counter(), time.process_time()
        engine.step()
        elapsed.append(time.perf_counter() - begin)
        processor.append(time.process_time() - processor_begin)
    return {"elapsed": elapsed, "processor": processor}
