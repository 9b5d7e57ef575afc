"""One rank's failure ends the step of all ranks: an error with its cause, and no token."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from vllm import SamplingParams

from vllm_davinci_testing.engines import pictures, vision_zoo
from vllm_davinci_testing.engines.dp_engines import DPEngines
from vllm_davinci_testing.engines.ended_process import assert_ended
from vllm_davinci_testing.engines.engine_process import EngineError
from vllm_davinci_testing.engines.failing_start import FAILING_METHOD
from vllm_davinci_testing.engines.fixture_types import Prompts, StartEngine, Zoo
from vllm_davinci_testing.engines.generating import as_inputs
from vllm_davinci_testing.engines.graph_settings import decode_graphs
from vllm_davinci_testing.engines.server_process import SMALL, ForkedServer
from vllm_davinci_testing.engines.split_settings import SPLIT_ALWAYS
from vllm_davinci_testing.engines.transformers_reference import assert_greedy

THOROUGH = pytest.mark.thorough
NIGHTLY = pytest.mark.nightly("faults")
MODEL = "llama_head64_gqa4"
TWO_RANKS: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "worker_extension_cls": "vllm_davinci_testing.engines.failing_worker.FailingWorker",
}
MAX_TOKENS = 16
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
FAILS_AT_TOKEN = 5
# From the fault to the client's error.
LIMIT_S = 30
# An engine's start on a busy machine.
START_S = 120


ASYNCHRONOUS = {"async_scheduling": True}
SYNCHRONOUS = {"async_scheduling": False}
PIPELINE = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}
GRAPHS = decode_graphs(2, 4)
UBATCHES = {"additional_config": {"dbo": {**SPLIT_ALWAYS, "split": "token"}}}
EXPERTS = {"enable_expert_parallel": True}
ALL_TO_ALL = {**EXPERTS, "additional_config": {"moe_communication": "all_to_all"}}
MOE = "qwen3_moe_softmax_top2_of_8"
ENTERS, SAMPLES = "model", "sampling"


@pytest.mark.parametrize(
    ("model", "options", "part", "rank"),
    [
        pytest.param(MODEL, ASYNCHRONOUS, ENTERS, 1, id="asynchronous"),
        pytest.param(MODEL, SYNCHRONOUS, ENTERS, 1, id="synchronous", marks=pytest.mark.thorough),
        pytest.param(MODEL, ASYNCHRONOUS, SAMPLES, 1, id="sampling", marks=NIGHTLY),
        pytest.param(MODEL, ASYNCHRONOUS, ENTERS, 0, id="replying_rank", marks=THOROUGH),
        pytest.param(MODEL, SYNCHRONOUS, SAMPLES, 0, id="replying_rank_samples", marks=THOROUGH),
        pytest.param(MODEL, SYNCHRONOUS, SAMPLES, 1, id="synchronous_sampling", marks=THOROUGH),
        pytest.param(MODEL, PIPELINE, ENTERS, 0, id="first_stage", marks=NIGHTLY),
        pytest.param(MODEL, PIPELINE, ENTERS, 1, id="last_stage", marks=THOROUGH),
        pytest.param(MODEL, GRAPHS, ENTERS, 1, id="graphs", marks=NIGHTLY),
        pytest.param(MODEL, UBATCHES, ENTERS, 1, id="ubatches", marks=THOROUGH),
        pytest.param(MOE, EXPERTS, ENTERS, 1, id="experts", marks=THOROUGH),
        pytest.param(MOE, ALL_TO_ALL, ENTERS, 1, id="row_counts", marks=THOROUGH),
    ],
)
def test_an_error_of_one_rank_is_the_client_s_error(
    model, options, part, rank, zoo, start_engine, prompts
):
    engine = start_engine(zoo(model), **{**TWO_RANKS, **options})
    engine.on_workers("fail_once_in_step", part, FAILS_AT_TOKEN, rank)
    begin = time.monotonic()
    with pytest.raises(EngineError) as error:
        engine.generate(as_inputs(prompts[:4]), GREEDY)
    assert time.monotonic() - begin < LIMIT_S
    # The rank that waits for a graph's replay also replies, after its device is stopped.
    told = rf"rank {rank} \(pid \d+ on host .*planted in {part}"
    assert re.search(told, str(error.value)), f"{error.value}\n{engine.log_text()[-8000:]}"
    with pytest.raises(EngineError):  # the engine does not recover
        engine.generate(as_inputs(prompts[:4]), GREEDY)
    engine.close()


@NIGHTLY
@pytest.mark.parametrize(
    "method",
    [
        pytest.param("load_model", marks=THOROUGH),
        pytest.param("profile_run", marks=THOROUGH),
        # During this method the other rank waits on the host until the time limit.
        "_init_minimal_kv_cache_for_profiling",
        pytest.param("initialize_kv_cache", marks=THOROUGH),
        pytest.param("capture_model", marks=THOROUGH),
    ],
)
def test_an_error_of_one_rank_at_the_start_ends_the_start(method, zoo, start_engine):
    begin = time.monotonic()
    worker = "vllm_davinci_testing.engines.failing_start.FailingStart"
    options = {**TWO_RANKS, **GRAPHS, "worker_cls": worker, "worker_extension_cls": ""}
    with pytest.raises(EngineError) as error:
        start_engine(zoo(MODEL), environment={FAILING_METHOD: method}, **options)
    assert time.monotonic() - begin < START_S + LIMIT_S
    told = rf"rank 1 \(pid \d+ on host .*planted in {method}"
    assert re.search(told, str(error.value)), str(error.value)[-8000:]


@pytest.mark.thorough
def test_an_error_in_the_vision_encoder_of_one_rank_is_the_client_s_error(start_engine, tmp_path):
    checkpoint = vision_zoo.write_vision_checkpoint("qwen2_5_vl", tmp_path / "vision")
    engine = start_engine(checkpoint, **TWO_RANKS, max_model_len=512)
    engine.on_workers("fail_once_in_step", "encoder", 0, 1)
    request = {
        "prompt": vision_zoo.prompt(1, "case"),
        "multi_modal_data": {"image": [pictures.image(112, 84, seed=1)]},
    }
    with pytest.raises(EngineError, match=r"rank 1 \(pid \d+ on host .*planted in encoder"):
        engine.generate([request], GREEDY)
    engine.close()


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["eagle3", "ngram"])
def test_an_error_in_the_drafter_of_one_rank_is_the_client_s_error(
    method: str, start_engine: StartEngine, repository: Path, prompts: Prompts
):
    checkpoints = repository / "checkpoints"
    drafter: dict[str, Any] = {"method": method, "num_speculative_tokens": 2}
    if method == "eagle3":
        drafter["model"] = str(checkpoints / "tiny_llama_eagle3")
    engine = start_engine(checkpoints / "tiny_llama", **TWO_RANKS, speculative_config=drafter)
    engine.on_workers("fail_once_in_step", "drafter", 2, 1)
    begin = time.monotonic()
    with pytest.raises(EngineError, match=r"rank 1 \(pid \d+ on host .*planted in drafter"):
        engine.generate(as_inputs(prompts[:4]), GREEDY)
    assert time.monotonic() - begin < LIMIT_S
    engine.close()


@pytest.mark.thorough
def test_an_error_of_one_data_parallel_engine_ends_the_others(zoo, start_engine, prompts):
    options = {name: TWO_RANKS[name] for name in ("worker_extension_cls",)}
    engines = DPEngines(start_engine, zoo(MOE), count=2, **options, **EXPERTS)
    with ThreadPoolExecutor(2) as threads:
        inputs = as_inputs(prompts[:4])
        engines.engines[1].on_workers("fail_once_in_step", ENTERS, FAILS_AT_TOKEN)
        begin = time.monotonic()
        asked = [threads.submit(each.generate, inputs, GREEDY) for each in engines.engines]
        for each in asked:
            with pytest.raises(EngineError, match=r"rank 1 \(pid \d+ on host .*planted in "):
                each.result()
    assert time.monotonic() - begin < LIMIT_S
    for engine in engines.engines:
        engine.close()


@pytest.mark.thorough
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("action", ["delay:60s", "die", "throw", "async:507015", "async:hang"])
def test_a_rank_that_is_slow_or_dies_or_fails_is_named_in_time(
    action: str, rank: int, zoo: Zoo, start_engine: StartEngine, prompts: Prompts
):
    limit_s = 40
    point = "launch:all_reduce" if action.startswith("async") else "collective:all_reduce"
    phase = "" if action.startswith("async") else ".put"
    engine = start_engine(
        zoo(MODEL),
        environment={
            "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(limit_s),
            # The start has fewer launches than this; start and requests have more.
            "VNPU_FAULTS": f"rank={rank};{point}@60{phase}={action}",
        },
        **TWO_RANKS,
    )
    _, *workers = engine.processes()
    begin = time.monotonic()
    with pytest.raises(EngineError) as error:
        engine.generate(as_inputs(prompts[:4]), GREEDY)
    assert time.monotonic() - begin < limit_s
    told = f"{error.value}{engine.log_text()}"
    assert "VNPU_FAULTS" in told
    named = rf"rank {rank} \(pid {workers[rank].pid}"
    assert re.search(named, told), told[-8000:]
    engine.close()
    assert_ended(workers)


@pytest.mark.parametrize(
    "is_asynchronous",
    [True, pytest.param(False, marks=THOROUGH)],
    ids=["asynchronous", "synchronous"],
)
def test_an_error_of_every_rank_ends_the_step_and_serving_continues(
    is_asynchronous, zoo, reference, start_engine, prompts
):
    with start_engine(zoo(MODEL), **TWO_RANKS, async_scheduling=is_asynchronous) as engine:
        for part in (ENTERS, SAMPLES):
            engine.on_workers("fail_once_in_step", part, FAILS_AT_TOKEN)
            with pytest.raises(EngineError, match=f"planted in {part}"):
                engine.generate(as_inputs(prompts[:4]), GREEDY)
            engine.abort_all()
            outputs = engine.generate(as_inputs(prompts[4:8]), GREEDY)
            assert_greedy(reference(MODEL), prompts[4:8], outputs, MAX_TOKENS)


@NIGHTLY
def test_a_stream_has_right_tokens_until_a_rank_fails_and_then_an_error(tiny_llama, tmp_path):
    server = ForkedServer(
        tiny_llama,
        tmp_path / "log.txt",
        *SMALL,
        "--tensor-parallel-size=2",
        f"--worker-extension-cls={TWO_RANKS['worker_extension_cls']}",
        environment={"VLLM_SERVER_DEV_MODE": "1"},
    ).wait_until_ready()
    try:
        prompt = [1, 2, 3]
        right = server.complete(prompt, 40)
        planted = {"method": "fail_once_in_step", "args": [ENTERS, 17, 1]}
        httpx.post(f"{server.url}/collective_rpc", json=planted, timeout=60).raise_for_status()
        body = {
            "model": str(tiny_llama),
            "prompt": prompt,
            "max_tokens": 40,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        begin = time.monotonic()
        tokens: list[int] = []
        errors: list[str] = []
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=90) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    errors.append(event["error"]["message"])
                else:
                    tokens += event["choices"][0]["token_ids"]
        assert time.monotonic() - begin < LIMIT_S
        assert tokens == right[: len(tokens)]
        assert len(tokens) <= 17
        (error,) = errors
        assert re.search(r"rank 1 \(pid \d+ on host \S+\) failed in execute_model", error), error
        assert "RuntimeError: planted in model" in error
        assert server.wait_for_end() == 1
        log = server.log_text()
        assert "RuntimeError: planted in model" in log
        assert "npuSynchronizeDevice" not in log  # a worker waits for its stopped device
    finally:
        server.kill()
