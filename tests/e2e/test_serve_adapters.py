"""A server that loads and unloads adapters while it serves, and that sleeps in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from vllm_davinci_testing.engines import adapters
from vllm_davinci_testing.engines.server_process import SMALL, ServerProcess
from vllm_davinci_testing.engines.transformers_reference import TransformersReference

BASE = "base"
PROMPT = [70, 71, 72, 73]
ENVIRONMENT = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
}


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> TransformersReference:
    return TransformersReference(tiny_llama)


@pytest.fixture(scope="module")
def server(
    tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., httpx.Response]]:
    """Posts to a path of the server."""
    log = tmp_path_factory.mktemp("server") / "log.txt"
    options = (
        f"--served-model-name={BASE}",
        "--enable-lora",
        "--max-loras=2",
        "--max-lora-rank=16",
        "--enable-sleep-mode",
    )
    process = ServerProcess(tiny_llama, log, *SMALL, *options, environment=ENVIRONMENT)
    try:
        process.wait_until_ready()
        yield lambda path, **body: httpx.post(
            f"{process.url}{path}", json=body or None, timeout=120
        )
    finally:
        process.kill()


def complete(server: Callable[..., httpx.Response], name: str) -> list[int]:
    answer: Any = server(
        "/v1/completions",
        model=name,
        prompt=PROMPT,
        max_tokens=12,
        temperature=0,
        ignore_eos=True,
        return_token_ids=True,
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def test_adapters_come_and_go_while_the_server_answers(
    server: Callable[..., httpx.Response], model: TransformersReference, tmp_path: Path
):
    paths = {
        f"adapter{seed}": adapters.write_adapter(
            model.network, tmp_path / f"adapter{seed}", rank=16, seed=seed
        )
        for seed in range(4)
    }
    with ThreadPoolExecutor(2) as pool:
        beside = [pool.submit(complete, server, BASE) for _ in range(8)]
        for name, path in paths.items():
            answer = server("/v1/load_lora_adapter", lora_name=name, lora_path=str(path))
            assert answer.status_code == 200, answer.text
        answers = {name: pool.submit(complete, server, name) for name in (BASE, *paths)}
        assert len({tuple(each.result()) for each in beside}) == 1
    for name, answer in answers.items():
        with adapters.adapted(model.network, paths.get(name)):
            assert model.first_difference(PROMPT, answer.result()) is None, name
    assert len({tuple(answer.result()) for answer in answers.values()}) == 5
    gone = server("/v1/unload_lora_adapter", lora_name="adapter0")
    assert gone.status_code == 200, gone.text
    assert server("/v1/completions", model="adapter0", prompt="a").status_code == 404


def test_an_adapter_that_does_not_fit_is_answered_with_its_layer(
    server: Callable[..., httpx.Response], tmp_path: Path
):
    name = "base_model.model.model.layers.0.self_attn.o_proj.lora_{}.weight"
    adapters.write_files(
        tmp_path,
        {name.format("A"): torch.ones(8, 256), name.format("B"): torch.ones(100, 8)},
        {"r": 8, "target_modules": ["o_proj"]},
    )
    answer = server("/v1/load_lora_adapter", lora_name="wrong", lora_path=str(tmp_path))
    assert answer.status_code >= 400
    assert "model.layers.0.self_attn.o_proj: shapes" in answer.text
    assert complete(server, BASE)


def test_a_server_sleeps_and_wakes(server: Callable[..., httpx.Response]):
    before = complete(server, BASE)
    assert server("/sleep?level=1").status_code == 200
    assert server("/wake_up").status_code == 200
    assert complete(server, BASE) == before
