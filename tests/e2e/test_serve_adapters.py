"""A server that loads and unloads adapters while serving, and sleeps in between."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
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
    "VNPU_RACES": "raise",
    "VNPU_SCHEDULE": "fuzz:7",
}


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> TransformersReference:
    return TransformersReference(tiny_llama)


@pytest.fixture(scope="module")
def url(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server whose workers raise an error for races."""
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
        yield process.url
    finally:
        process.kill()


@pytest.fixture(scope="module")
def server(url: str) -> Callable[..., httpx.Response]:
    """Returns a function that posts to a path of the server."""
    return lambda path, **body: httpx.post(f"{url}{path}", json=body or None, timeout=120)


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


def test_adapters_come_and_go_while_the_server_answers(server, model, tmp_path):
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
    # A trainer of adapters does this after each step.
    body = {"lora_name": "adapter1", "lora_path": str(paths["adapter0"]), "load_inplace": True}
    assert server("/v1/load_lora_adapter", **body).status_code == 200
    assert complete(server, "adapter1") == answers["adapter0"].result()
    gone = server("/v1/unload_lora_adapter", lora_name="adapter0")
    assert gone.status_code == 200, gone.text
    assert server("/v1/completions", model="adapter0", prompt="a").status_code == 404


def test_an_adapter_that_does_not_fit_is_answered_with_its_layer(server, tmp_path):
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


def stream(url: str, prompt: list[int], max_tokens: int, has_begun: Event) -> list[int]:
    """Streams one request; sets `has_begun` at the first token and returns all tokens."""
    body = {
        "model": BASE,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    tokens: list[int] = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                tokens += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"] or []
                has_begun.set()
    return tokens


@pytest.mark.parametrize("mode", ["abort", "keep", "wait"])
def test_a_server_sleeps_while_requests_are_under_way(url, server, model, mode):
    prompts = [[*PROMPT, number] for number in range(80, 84)]
    count = 180  # long enough that no request ends before the server is put to sleep
    with ThreadPoolExecutor(len(prompts)) as pool:
        begun = [Event() for _ in prompts]
        streams = [
            pool.submit(stream, url, prompt, count, event)
            for prompt, event in zip(prompts, begun, strict=True)
        ]
        assert all(event.wait(60) for event in begun)
        assert server(f"/sleep?level=1&mode={mode}").status_code == 200
        assert httpx.get(f"{url}/is_sleeping").json() == {"is_sleeping": True}
        done = sum(each.done() for each in streams)
        assert server("/wake_up").status_code == 200
        tokens = [each.result(120) for each in streams]
    assert done < len(streams) or mode != "keep"
    for prompt, found in zip(prompts, tokens, strict=True):
        assert model.first_difference(prompt, found) is None
    lengths = {len(found) for found in tokens}
    assert lengths == {count} if mode != "abort" else max(lengths) < count


def test_a_server_lends_the_memory_of_its_cache(server: Callable[..., httpx.Response]):
    before = complete(server, BASE)
    assert server("/sleep?level=0").status_code == 200  # pauses
    assert server("/release_kv_cache_memory").status_code == 200
    assert server("/wake_up?tags=kv_cache").status_code == 200
    assert server("/wake_up?tags=scheduling").json()["status"] == "awake"
    assert complete(server, BASE) == before
