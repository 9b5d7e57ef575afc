"""When dual-batch overlap splits a step; log and metrics report it."""

import json
import re
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from vllm_davinci.meta.server_metrics import decision_counts, metrics_text
from vllm_davinci_testing.engines.engine_process import EngineProcess
from vllm_davinci_testing.engines.generating import TWO_RANKS, as_inputs
from vllm_davinci_testing.engines.server_process import SMALL, ForkedServer, ServerProcess
from vllm_davinci_testing.engines.split_engines import (
    FIRST_TOKEN,
    GREEDY,
    MAX_TOKENS,
    decisions,
    overlapped,
    random_prompts,
)
from vllm_davinci_testing.engines.transformers_reference import assert_greedy
from vllm_davinci_testing.processes.forked import run_command
from vllm_davinci_testing.processes.waiting import becomes_true

MODEL = "llama_head64_gqa4"

# Attempts to send requests to both DP ranks until their steps coincide.
MEETING_LIMIT = 20


@pytest.fixture(scope="module")
def engine(zoo: Callable[[str], Path], start_engine: Callable[..., EngineProcess]) -> EngineProcess:
    """An engine with vLLM's own overlap flag and default thresholds."""
    return start_engine(
        zoo(MODEL), environment={"VLLM_LOG_STATS_INTERVAL": "0.1"}, **TWO_RANKS, enable_dbo=True
    )


@pytest.mark.parametrize(
    ("lengths", "reason"),
    [
        pytest.param([128, 128], "split", id="256_tokens"),
        pytest.param([128, 127], "few_tokens", id="255_tokens"),
        pytest.param([200, 100], "no_cut", id="no_boundary_near_the_middle"),
    ],
)
def test_the_first_step_is_split_or_not_by_its_tokens(lengths, reason, engine, reference):
    before = decisions(engine)
    prompts = random_prompts(sum(lengths), lengths)
    outputs = engine.generate(as_inputs(prompts), FIRST_TOKEN)
    assert decisions(engine) - before == Counter({reason: 1})
    assert_greedy(reference(MODEL), prompts, outputs, 1)


@pytest.mark.nightly("layouts")
def test_decodes_stay_whole_unless_asked_for(engine: EngineProcess):
    before = decisions(engine)
    engine.generate(as_inputs(random_prompts(1, [5] * 60)), GREEDY)
    given = decisions(engine) - before
    assert given["no_prefill"] == MAX_TOKENS - 1
    assert given["split"] == 1


@pytest.mark.thorough
def test_prefills_and_decodes_are_split_from_their_own_thresholds_on(zoo, start_engine, reference):
    options = {"enabled": True, "decode": True, "min_total_tokens_to_split": 2}
    with start_engine(zoo(MODEL), **TWO_RANKS, additional_config={"dbo": options}) as engine:
        for lengths, reason in (([32, 32], "split"), ([32, 31], "few_prefill_tokens")):
            before = decisions(engine)
            prompts = random_prompts(sum(lengths), lengths)
            outputs = engine.generate(as_inputs(prompts), FIRST_TOKEN)
            assert decisions(engine) - before == Counter({reason: 1})
            assert_greedy(reference(MODEL), prompts, outputs, 1)
        for count, reason in ((32, "split"), (31, "few_decode_tokens")):
            before = decisions(engine)
            prompts = random_prompts(count, [5] * count)
            outputs = engine.generate(as_inputs(prompts), GREEDY)
            # Prefills exceed both thresholds.
            expected = Counter({"split": 1}) + Counter({reason: MAX_TOKENS - 1})
            assert decisions(engine) - before == expected
            assert_greedy(reference(MODEL), prompts, outputs, MAX_TOKENS)


@pytest.mark.nightly("layouts")
def test_a_prefix_that_this_very_step_fills_is_not_cut_off_from_its_readers(engine, reference):
    # All four start together: the first request fills the block that the others read.
    prefix = random_prompts(7, [128])[0]
    prompts = [prefix + random_prompts(seed, [100])[0] for seed in range(4)]
    outputs = engine.generate(as_inputs(prompts), FIRST_TOKEN)
    assert sum(output.num_cached_tokens for output in outputs) >= 128
    assert_greedy(reference(MODEL), prompts, outputs, 1)


def test_the_log_tells_why(engine: EngineProcess):
    assert "--enable-dbo is served as dbo.enabled = True" in engine.log_text()
    for lengths in ([128, 128], [9, 9]):
        time.sleep(0.2)  # the first step after the interval logs the line
        engine.generate(as_inputs(random_prompts(1, lengths)), FIRST_TOKEN)
    lines = re.findall(r"decisions by step: (.*)", engine.log_text())
    assert "2 requests, 256 tokens, 256 of them prefill, cut at 128" in "\n".join(lines)
    assert lines[-1].endswith("2 requests, 18 tokens, 18 of them prefill)")


def split_steps(server: ServerProcess) -> dict[str, int]:
    """Returns the number of split steps by DP rank."""
    counts = decision_counts(metrics_text(server.url))
    return {engine: n for (engine, reason), n in counts.items() if reason == "split"}


@pytest.mark.nightly("layouts")
def test_dp_ranks_split_together_and_the_metrics_say_so(zoo, reference, prompts, tmp_path):
    model = "qwen3_moe_softmax_top2_of_8"
    server = ForkedServer(
        zoo(model),
        tmp_path / "log.txt",
        *SMALL,
        "--data-parallel-size=2",
        "--enable-expert-parallel",
        f"--additional-config={json.dumps(overlapped(split='token')['additional_config'])}",
    )
    try:
        server.wait_until_ready()

        def complete(dp_rank: int) -> list[list[int]]:
            answer = httpx.post(
                f"{server.url}/v1/completions",
                headers={"X-data-parallel-rank": str(dp_rank)},
                json={
                    "model": str(zoo(model)),
                    "prompt": prompts[dp_rank:24:2],
                    "max_tokens": 64,
                    "temperature": 0,
                    "ignore_eos": True,
                    "return_token_ids": True,
                },
                timeout=300,
            )
            answer.raise_for_status()
            return [choice["token_ids"] for choice in answer.json()["choices"]]

        # Steps of both DP ranks must coincide, and a request may reach its rank late.
        generated: list[tuple[int, list[list[int]]]] = []
        with ThreadPoolExecutor(2) as threads:
            for _ in range(MEETING_LIMIT):
                generated += enumerate(threads.map(complete, (0, 1)))
                if split_steps(server):
                    break
        # Workers may still be sending the last steps' counts.
        becomes_true(
            lambda: len(split_steps(server)) == 2 and len({*split_steps(server).values()}) == 1, 30
        )
        counts = split_steps(server)
        explained = run_command("vllm_davinci.meta", "explain", server.url, COLUMNS="200").stdout
        server.interrupt()
        server.wait_for_end()
    finally:
        server.kill()
    for dp_rank, answers in generated:
        for prompt, tokens in zip(prompts[dp_rank:24:2], answers, strict=True):
            assert len(tokens) == 64
            assert reference(model).first_difference(prompt, tokens) is None
    assert counts["0"] == counts["1"] > 0
    assert re.search(rf"{2 * counts['0']} of \d+ steps were split", explained)
    assert re.search(rf"│ +1 │ +{counts['1']} \(\d+%\) +│ split ", explained)
