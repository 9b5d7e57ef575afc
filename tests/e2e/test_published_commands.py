"""The published DeepSeek server commands and clients, with few ranks and short texts.

Lengths are divided by 32, and the model is tiny_deepseek. Flags and keys are unchanged, except
those that vLLM has dropped (docs/guides/published_commands.md).
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_davinci.core.export.exporter import Exporter
from vllm_davinci_testing.engines.server_process import FORKED_WORKERS, VLLM_MODULE, ServerProcess
from vllm_davinci_testing.engines.split_settings import PUBLISHED
from vllm_davinci_testing.processes.forked import run_command

pytestmark = pytest.mark.nightly("planning")

THOROUGH = pytest.mark.thorough
CLIENT_LIMIT_S = 600

MLA_CONFIG: dict[str, Any] = {
    "torchair_graph_config": {
        "enable_multistream_mla": True,
        "enabled": True,
        "use_cached_graph": True,
        "graph_batch_sizes": [24],
    },
    "ascend_scheduler_config": {"enabled": True},
}
MLA_SERVER = (
    "--quantization=ascend", "--served-model-name=auto", "--trust-remote-code",
    "--distributed-executor-backend=mp", "--max-num-seqs=24", "--max-model-len=1024",
    "--max-num-batched-tokens=256", "--block-size=128", "--no-enable-prefix-caching",
    "--gpu-memory-utilization=0.96",
)  # fmt: skip
MLA_CLIENT = (
    "--random-input-len=128", "--random-output-len=48", "--max-concurrency=24",
    "--metric-percentiles=50,90,99",
)  # fmt: skip
DBO_SERVER = (
    "--served-model-name=auto", "--trust-remote-code", "--distributed-executor-backend=mp",
    "--max-num-seqs=390", "--max-model-len=1024", "--max-num-batched-tokens=2048",
    "--block-size=128", "--gpu-memory-utilization=0.75",
)  # fmt: skip
DBO_CLIENT = (
    "--random-input-len=128", "--random-output-len=1", "--max-concurrency=8",
    "--metric-percentiles=90",
)  # fmt: skip


class PublishedServer(ServerProcess):
    """Starts the API server's module, as the published commands do."""

    def _command(self, arguments: list[str]) -> list[str]:
        serve, model, *options = arguments
        assert serve == "serve"
        module = "vllm.entrypoints.openai.api_server"
        return [sys.executable, "-m", module, f"--model={model}", *options]


@pytest.fixture(scope="module")
def int8_deepseek(tiny_deepseek: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("int8") / "tiny_deepseek"
    kind = "W8A8_DYNAMIC"
    Exporter(tiny_deepseek, directory, kind, torch.bfloat16, None).run(lambda _: None)
    return directory


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    started: list[ServerProcess] = []

    def start(model: Path, *options: str, **variables: str) -> ServerProcess:
        # The device is small: cache, communicators and streams' workspaces fit.
        environment = {"VNPU_MEMORY": "2GiB", "HF_HUB_OFFLINE": "1", **variables}
        server = PublishedServer(model, tmp_path / "log.txt", *options, environment=environment)
        started.append(server)
        return server.wait_until_ready()

    yield start
    for server in started:
        server.interrupt()
        server.wait_for_end()


def bench(server: ServerProcess, tokenizer: Path, prompts: int, options: tuple[str, ...]) -> Any:
    """Runs `vllm bench serve`; returns its result file."""
    directory = server.log.parent
    ended = run_command(
        VLLM_MODULE, "bench", "serve", "--backend=vllm", f"--base-url={server.url}", "--model=auto",
        f"--tokenizer={tokenizer}", "--dataset-name=random", f"--num-prompts={prompts}",
        "--ignore-eos", "--request-rate=50", "--save-result", f"--result-dir={directory}",
        "--result-filename=result.json", *options,
        limit_s=CLIENT_LIMIT_S, HF_HUB_OFFLINE="1",
    )  # fmt: skip
    assert ended.status == 0, ended.output[-3000:] + server.tail()
    return json.loads((directory / "result.json").read_text(encoding="utf-8"))


RANKS_AND_PROMPTS = [
    pytest.param(2, 200, id="2_ranks_200_prompts", marks=THOROUGH),
    pytest.param(4, 200, id="4_ranks_200_prompts", marks=THOROUGH),
]


@pytest.mark.parametrize(
    ("ranks", "prompts", "environment"),
    [
        pytest.param(2, 12, FORKED_WORKERS, id="2_ranks"),
        *(pytest.param(*each.values, {}, id=each.id, marks=THOROUGH) for each in RANKS_AND_PROMPTS),
    ],
)
def test_the_server_for_mla_multistream(ranks, prompts, environment, serve, int8_deepseek):
    config = {**MLA_CONFIG, "expert_tensor_parallel_size": ranks}
    server = serve(
        int8_deepseek,
        f"-tp={ranks}",
        *MLA_SERVER,
        f"--additional-config={json.dumps(config)}",
        **environment,
    )
    result = bench(server, int8_deepseek, prompts, MLA_CLIENT)
    assert result["completed"] == prompts
    assert result["total_output_tokens"] == 48 * prompts
    log = server.log_text()
    assert "1 graphs of 24 tokens" in log
    assert "PrefillFirstScheduler" in log


@pytest.mark.parametrize(("ranks", "prompts"), RANKS_AND_PROMPTS)
def test_the_server_for_dual_batch_overlap(ranks, prompts, serve, tiny_deepseek):
    server = serve(
        tiny_deepseek,
        f"-tp={ranks}",
        *DBO_SERVER,
        f"--additional-config={json.dumps(PUBLISHED)}",
        VLLM_ASCEND_ENABLE_DBO="1",
    )
    result = bench(server, tiny_deepseek, prompts, DBO_CLIENT)
    assert result["completed"] == prompts
    log = server.log_text()
    note = "'init_torchair_graph_batch_sizes' has no effect: torchair_graph_config.enabled is false"
    assert note in log
    assert "VLLM_ASCEND_ENABLE_DBO=1 is served as dbo.enabled" in log
