"""A trainer sends a server new weights over HCCL; they equal a fresh engine's bit for bit."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from vllm_davinci.core.export.exporter import Exporter
from vllm_davinci_testing.engines import weight_trainer
from vllm_davinci_testing.engines.changed_checkpoint import changed
from vllm_davinci_testing.engines.int8_checkpoint import input_ranges
from vllm_davinci_testing.engines.refusals import refusal_of
from vllm_davinci_testing.engines.server_process import SMALL, ForkedServer, ServerProcess

PROMPTS = [[70, 71, 72], [*range(40, 90)]]
OPTIONS = (*SMALL[1:], "--no-enable-prefix-caching", "--max-num-batched-tokens=256")
GRAPHS = (
    '--compilation-config={"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [2, 4]}'
)
DEVELOPMENT = {"VLLM_SERVER_DEV_MODE": "1"}
HCCL = '--weight-transfer-config={"backend": "hccl"}'


def state(server: ServerProcess) -> tuple[list[list[int]], dict[str, str]]:
    """Returns greedy tokens, and a checksum of each rank's tensors."""
    answer = httpx.post(f"{server.url}/weight_checker", json={"action": "checksum"}, timeout=120)
    answer.raise_for_status()
    return [server.complete(prompt, 12) for prompt in PROMPTS], answer.json()["checksums"]


@pytest.mark.nightly("weights")
@pytest.mark.parametrize(
    ("name", "ranks", "more"),
    [
        pytest.param("tiny_llama", 1, (), id="dense"),
        pytest.param(
            "tiny_deepseek",
            2,
            ("--enable-lora", "--max-lora-rank=8"),
            id="mla_experts_tp2_in_wrappers",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_sent_weights_equal_those_of_a_fresh_server(repository, tmp_path, name, ranks, more):
    old = repository / "checkpoints" / name
    new = changed(old, tmp_path / "new", seed=1)
    options = (*OPTIONS, GRAPHS, f"--tensor-parallel-size={ranks}", *more)
    expected = {}
    for number, checkpoint in enumerate((new, old)):
        log = tmp_path / f"{number}.txt"
        server = ForkedServer(checkpoint, log, *options, HCCL, environment=DEVELOPMENT)
        try:
            server.wait_until_ready()
            expected[checkpoint] = state(server)
            if checkpoint == old:
                check_updates(server, ranks, expected, [new, old, new])
        finally:
            server.kill()
    assert expected[old] != expected[new]


def check_updates(
    server: ServerProcess, ranks: int, expected: dict[Path, Any], checkpoints: list[Path]
) -> None:
    """Sends each checkpoint in turn, and checks the server's weights and tokens."""
    arguments = [server.url, str(ranks), str(ranks), *map(str, checkpoints)]
    trainer = subprocess.Popen(
        [sys.executable, weight_trainer.__file__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert trainer.stdin is not None and trainer.stdout is not None
        for checkpoint in checkpoints:
            line = trainer.stdout.readline()
            while line and not line.startswith(str(checkpoint)):
                line = trainer.stdout.readline()
            assert line, server.tail()
            tokens, digests = state(server)
            assert digests == expected[checkpoint][1]
            assert tokens == expected[checkpoint][0]
            trainer.stdin.write("\n")
            trainer.stdin.flush()
        assert trainer.wait(60) == 0
    finally:
        trainer.kill()


def test_other_backends_end_the_start(tiny_llama: Path):
    said = refusal_of(tiny_llama, weight_transfer_config={"backend": "ipc"})
    assert "--weight-transfer-config with backend 'ipc'" in said


def test_weights_that_would_not_arrive_end_the_start(tiny_llama: Path, tmp_path: Path):
    ranges = input_ranges(tiny_llama, [torch.tensor([[*range(40, 90)]])])
    Exporter(tiny_llama, tmp_path, "W8A8", torch.bfloat16, ranges).run(lambda _: None)
    hccl = {"backend": "hccl"}
    said = refusal_of(tmp_path, weight_transfer_config=hccl, dtype="bfloat16")
    assert "--quantization is not supported with --weight-transfer-config" in said
