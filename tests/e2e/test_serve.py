"""A real server and the openai client."""

import gzip
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from vllm_davinci_testing.engines.alarms import alarming_lines
from vllm_davinci_testing.engines.server_process import (
    SMALL,
    VLLM_MODULE,
    ServerProcess,
    shared_memory,
)
from vllm_davinci_testing.processes.forked import run_command

MODEL = "tiny_llama"
# Log lines of vLLM and torch in a server that may be profiled.
OF_PROFILER = (
    "Profiler with mode 'torch' is enabled in the API server",
    "External init callback must run in same thread as registerClient",
)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output directory of the server's profiler."""
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def server(
    tiny_llama: Path, traces: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("server") / "log.txt"
    # torch 2.13 records Python frames by pointers to code. If that code is freed while recording,
    # as a module's code after its import, a name may no longer be text.
    profiler = json.dumps(
        {"profiler": "torch", "torch_profiler_dir": str(traces), "torch_profiler_with_stack": False}
    )
    # Without a shutdown timeout, vLLM kills the engine of an interrupted server.
    options = (
        f"--served-model-name={MODEL}",
        "--shutdown-timeout=20",
        f"--profiler-config={profiler}",
    )
    server = ServerProcess(tiny_llama, log, *SMALL, *options)
    try:
        yield server.wait_until_ready()
    finally:
        server.kill()


def complete(client: openai.OpenAI, prompt: str, max_tokens: int = 16) -> str:
    completion = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=max_tokens, temperature=0
    )
    return completion.choices[0].text


def metric(server: ServerProcess, name: str) -> float:
    """Returns the sum of a metric over its labels."""
    lines = httpx.get(f"{server.url}/metrics", timeout=30).text.splitlines()
    values = [line.rsplit(" ", 1)[1] for line in lines if line.startswith((name + "{", name + " "))]
    assert values, f"/metrics has no {name}"
    return sum(map(float, values))


def test_a_completion_counts_its_tokens(client: openai.OpenAI):
    completion = client.completions.create(
        model=MODEL, prompt="import ", max_tokens=12, temperature=0, logprobs=2
    )
    (choice,) = completion.choices
    assert choice.finish_reason == "length"
    assert completion.usage.completion_tokens == 12
    assert len(choice.logprobs.token_logprobs) == 12
    assert "".join(choice.logprobs.tokens) == choice.text


def test_a_chat_answers_with_the_templates_roles(client: openai.OpenAI):
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "def main("}],
        max_tokens=12,
        temperature=0,
    )
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens <= 12


def test_a_stream_adds_up_to_the_whole_text(client: openai.OpenAI):
    whole = complete(client, "class ", max_tokens=24)
    stream = client.completions.create(
        model=MODEL, prompt="class ", max_tokens=24, temperature=0, stream=True
    )
    parts = [chunk.choices[0].text for chunk in stream if chunk.choices]
    assert len(parts) > 4
    assert "".join(parts) == whole


def test_concurrent_requests_get_the_texts_they_get_alone(server, client):
    prompts = [f"def function_{n}(" for n in range(8)] + ["import ", "class A", "    for ", "x = "]
    alone = [complete(client, prompt) for prompt in prompts]
    with ThreadPoolExecutor(24) as threads:
        together = list(threads.map(lambda prompt: complete(client, prompt), prompts * 4))
    assert together == alone * 4


def test_metrics_count_requests_and_tokens(server: ServerProcess, client: openai.OpenAI):
    requests = metric(server, "vllm:request_success_total")
    tokens = metric(server, "vllm:generation_tokens_total")
    complete(client, "def ", max_tokens=5)
    assert metric(server, "vllm:request_success_total") == requests + 1
    assert metric(server, "vllm:generation_tokens_total") == tokens + 5


def test_a_request_ends_when_its_client_leaves(server: ServerProcess, client: openai.OpenAI):
    stream = client.completions.create(
        model=MODEL,
        prompt="def ",
        max_tokens=240,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 30
    while metric(server, "vllm:num_requests_running") > 0:
        assert time.monotonic() < deadline, "The request still runs 30 s after its client left"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("prompt", "max_tokens"),
    [("x = 1\n" * 5000, 1), ("x = 1\n", 300)],
    ids=["prompt", "max_tokens"],
)
def test_an_oversized_request_is_refused_with_the_limit(prompt, max_tokens, client):
    with pytest.raises(openai.BadRequestError, match="256") as refusal:
        complete(client, prompt, max_tokens=max_tokens)
    assert refusal.value.status_code == 400


@pytest.mark.nightly("planning")
def test_the_profile_endpoints_write_a_trace_with_rows_of_the_device(server, client, traces):
    httpx.post(f"{server.url}/start_profile", timeout=60).raise_for_status()
    complete(client, "the", max_tokens=3)
    httpx.post(f"{server.url}/stop_profile", timeout=60).raise_for_status()
    (trace,) = traces.glob("*rank0*.pt.trace.json.gz")
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    assert len(kernels) > 30
    assert all(event["name"].startswith("aclnn") for event in kernels)


def test_bench_serve_measures_the_server(server: ServerProcess, tiny_llama: Path, tmp_path: Path):
    ended = run_command(
        VLLM_MODULE, "bench", "serve", f"--model={MODEL}", f"--tokenizer={tiny_llama}",
        f"--base-url={server.url}", "--dataset-name=random", "--random-input-len=16",
        "--random-output-len=8", "--num-prompts=6", "--ignore-eos", "--save-result",
        f"--result-dir={tmp_path}", "--result-filename=result.json",
    )  # fmt: skip
    assert ended.status == 0, ended.output[-4000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["total_output_tokens"]) == (6, 48)


def test_an_interrupt_ends_the_server_quietly_and_frees_shared_memory(server: ServerProcess):
    # Last in the file, because the other tests need the server.
    held = shared_memory(server.processes())
    server.interrupt()
    assert server.wait_for_end() == 0
    assert not [path for path in held if path.exists()]
    assert f"Starting vLLM server on {server.url}" in server.log_text()
    assert "Requests need no API key" in server.log_text()
    found = alarming_lines(server.log_text())
    assert [line for line in found if not any(part in line for part in OF_PROFILER)] == []
