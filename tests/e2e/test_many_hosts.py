"""Engines over two hosts give the tokens of the same ranks on one host."""

import sys
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from vllm_davinci_testing.engines.host_engine import environment_on, generate_on, tokens_in
from vllm_davinci_testing.processes.hosts import two_hosts
from vllm_davinci_testing.processes.waiting import becomes_true

pytestmark = pytest.mark.nightly("hosts")

MODEL = "llama_head64_gqa4"
MAX_TOKENS = 24
LIMIT_S = 400.0
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 2048,  # a server's default differs from LLM's
    "kv_cache_memory_bytes": 96 << 20,
    "distributed_executor_backend": "mp",
}
# Two ranks share a context's tokens alternately.
DIVIDED = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}


@pytest.mark.parametrize(
    ("model", "ranks"),
    [
        (MODEL, {"tensor_parallel_size": 2}),
        pytest.param(MODEL, {"pipeline_parallel_size": 2}, marks=pytest.mark.thorough),
        pytest.param(MODEL, {"tensor_parallel_size": 4}, marks=pytest.mark.thorough),
        pytest.param("deepseek_v3_dense", DIVIDED, marks=pytest.mark.thorough),
    ],
)
def test_tokens_equal_those_of_one_host(model, ranks, zoo, start_engine, prompts, tmp_path):
    over_hosts = _tokens_over_hosts(zoo(model), ranks, prompts, tmp_path)
    with start_engine(zoo(model), distributed_executor_backend="mp", **ranks) as engine:
        outputs = engine.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True),
        )
    assert over_hosts == [list(output.outputs[0].token_ids) for output in outputs]


def _tokens_over_hosts(
    model: Path, ranks: dict[str, int], prompts: list[list[int]], directory: Path
) -> list[list[int]]:
    """Returns the tokens of an engine with half of its ranks on each of two hosts."""
    nodes = {"nnodes": 2, "master_addr": "10.77.0.1", "master_port": 29501}
    options = OPTIONS | ranks | nodes
    headless = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
        for name, value in (options | {"node_rank": 1, "headless": True}).items()
    ]
    serve = ["-m", "vllm.entrypoints.cli.main", "serve", str(model), *headless]
    logs = [directory / "host1.txt", directory / "host2.txt"]
    with two_hosts() as hosts:
        # vLLM keeps the second server waiting for another engine; it ends with its host.
        hosts[1].start([sys.executable, *serve], environment_on(hosts[1]), logs[1])
        of_program = options | {"model": str(model), "node_rank": 0}
        first = generate_on(hosts[0], of_program, prompts, MAX_TOKENS, logs[0])
        ended = becomes_true(lambda: first.poll() is not None, LIMIT_S)
        told = "\n".join(log.read_text(errors="replace")[-4000:] for log in logs)
        assert ended and first.returncode == 0, told
    return tokens_in(logs[0])
