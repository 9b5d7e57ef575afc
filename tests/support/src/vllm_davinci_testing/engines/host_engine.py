"""An engine in a program on a test host."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from vllm_davinci_testing.engines.server_process import FORKED_WORKERS
from vllm_davinci_testing.processes.hosts import Host

_GENERATE = """
import json, sys
from vllm import LLM, SamplingParams

prompts, options = json.loads(sys.argv[1]), json.loads(sys.argv[2])
engine = LLM(**options)
outputs = engine.generate(
    [{"prompt_token_ids": prompt} for prompt in prompts],
    SamplingParams(temperature=0, max_tokens=int(sys.argv[3]), ignore_eos=True),
)
print("TOKENS", json.dumps([output.outputs[0].token_ids for output in outputs]), flush=True)
"""


def environment_on(host: Host) -> dict[str, str]:
    """Returns variables for a program with one of several engines."""
    return {**FORKED_WORKERS, "VLLM_HOST_IP": host.address, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def generate_on(
    host: Host,
    options: dict[str, Any],
    prompts: list[list[int]],
    max_tokens: int,
    log: Path,
    **variables: str,
) -> subprocess.Popen[bytes]:
    """Starts a program that makes an engine and prints its greedy tokens. options: for vllm.LLM"""
    texts = [json.dumps(prompts), json.dumps(options), str(max_tokens)]
    command = [sys.executable, "-c", _GENERATE, *texts]
    return host.start(command, {**environment_on(host), **variables}, log)


def tokens_in(log: Path) -> list[list[int]]:
    """Returns the program's output."""
    lines = log.read_text(errors="replace").splitlines()
    line = next(line for line in lines if line.startswith("TOKENS "))
    tokens: list[list[int]] = json.loads(line.removeprefix("TOKENS "))
    return tokens
