"""Times one engine's steps, one batch per question.

`python timed_steps_process.py OPTIONS_JSON FD` answers each question with a batch's step times, so
that two engines can take turns.
"""

import json
import os
import sys
import time
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
from generation import engine_arguments, prompts
from vllm import LLM, SamplingParams


def answer(options: dict[str, Any], answers: int) -> None:
    """Answers the questions on standard input. answers: file descriptor for the answers"""
    llm = LLM(**engine_arguments(options))
    with os.fdopen(answers, "w", buffering=1) as out:
        print(json.dumps("ready"), file=out)
        for number, _ in enumerate(sys.stdin):
            print(json.dumps(_steps_of_batch(llm, number, options)), file=out)


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


if __name__ == "__main__":
    torch.set_num_threads(1)
    answer(json.loads(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)
