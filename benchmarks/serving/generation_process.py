"""Runs one engine in its own process: start-up time, tokens per second, memory.

It runs in either side's environment, and uses vLLM's public API only.
"""

import os
import time
from pathlib import Path
from typing import Any

from serving.generation import engine_arguments, prompts

BEGIN = time.perf_counter()


def _peak_bytes(pid: str | int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text(encoding="utf-8").split():
            found += [int(child), *_descendants(int(child))]
    return found


def measure(options: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams  # timed, because start-up includes the import

    imported_s = time.perf_counter() - BEGIN
    llm = LLM(**engine_arguments(options))
    constructed_s = time.perf_counter() - BEGIN
    questions = prompts(options)
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    llm.generate(questions[:1], one, use_tqdm=False)
    start_up_s = time.perf_counter() - BEGIN

    sampling = SamplingParams(temperature=0, max_tokens=options["output_tokens"], ignore_eos=True)
    rates = []
    for _ in range(options["repetitions"] + 1):
        begin = time.perf_counter()
        outputs = llm.generate(questions, sampling, use_tqdm=False)
        elapsed = time.perf_counter() - begin
        produced = sum(len(output.outputs[0].token_ids) for output in outputs)
        rates.append(produced / elapsed)
    processes = [os.getpid(), *_descendants(os.getpid())]
    return {
        "start_up_s": start_up_s,
        "start_up_parts_s": {
            "import of vLLM": imported_s,
            "engine": constructed_s - imported_s,
            "first token": start_up_s - constructed_s,
        },
        "warm_up_tokens_per_s": rates[0],
        "tokens_per_s": rates[1:],
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        # The engine is a child process, so the front end's memory is not included.
        "engine_peak_bytes": max(_peak_bytes(pid) for pid in processes[1:] or processes),
        "front_end_peak_bytes": _peak_bytes(processes[0]),
    }
