"""`vllm-davinci compare`: a shipped checkpoint gives transformers' tokens."""

import json
from pathlib import Path

import pytest

from vllm_davinci_testing.processes.forked import run_command

LIMIT_S = 300


@pytest.mark.nightly("planning")
@pytest.mark.parametrize("options", [(), ("--", "--no-enforce-eager")], ids=["eager", "graphs"])
def test_all_tokens_equal_those_of_transformers(repository: Path, options: tuple[str, ...]) -> None:
    model = repository / "checkpoints" / "tiny_llama"
    work = ("--max-tokens=8", "--dtype=float32", "--json")
    done = run_command("vllm_davinci.meta", "compare", model, *work, *options, limit_s=LIMIT_S)
    assert done.status == 0, done.output[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["prompts"] == found["equal_prompts"] > 0
    assert found["tokens"] == found["equal_tokens"] > 0
    assert (found["graph_replays"] > 0) == bool(options)
