"""Dual-batch overlap: the same tokens as whole steps, in every schedule, without a race."""

from __future__ import annotations

import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from vllm import SamplingParams

from vllm_davinci.meta.server_metrics import decision_counts, metrics_text
from vllm_davinci.vnpu import timeline
from vllm_davinci_testing.engines import model_zoo
from vllm_davinci_testing.engines.engine_process import EngineError, EngineProcess
from vllm_davinci_testing.engines.server_process import SMALL, ForkedServer, ServerProcess
from vllm_davinci_testing.engines.split_settings import SPLIT_ALWAYS
from vllm_davinci_testing.engines.transformers_reference import TransformersReference, assert_greedy
from vllm_davinci_testing.processes.forked import run_command
from vllm_davinci_testing.processes.waiting import becomes_true

MODEL = "llama_head64_gqa4"
MAX_TOKENS = 16
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
FIRST_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=5)

TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}

# How often DP ranks are asked at once until a step of one met one of the other.
MEETING_LIMIT = 20


def overlapped(**options: Any) -> dict[str, Any]:
    return {"additional_config": {"dbo": {**SPLIT_ALWAYS, **options}}}


def as_inputs(prompts: list[list[int]]) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def decisions(engine: EngineProcess) -> Counter[str]:
    """Reason -> number of steps; every rank decided alike."""
    first, *others = engine.on_workers("overlap_decisions")
    # A stage of a pipeline warms up on its own.
    assert all({**other, "not_a_step": 0} == {**first, "not_a_step": 0} for other in others)
    return Counter(first)


def random_prompts(seed: int, lengths: list[int]) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(model_zoo.NUM_BYTES) for _ in range(n)] for n in lengths]


# --- exact tokens ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param(MODEL, overlapped(), id="request"),
        pytest.param(
            "qwen3_norm_head128_gqa2",
            {
                **overlapped(split="token"),
                "max_num_batched_tokens": 96,
                "max_num_seqs": 16,
                # Tables are of these blocks; each ubatch has one of the operator's for itself.
                "block_size": 256,
                "environment": {"VNPU_RACES": "raise", "VNPU_SCHEDULE": "fuzz:7"},
            },
            id="token_chunked_qwen3_blocks256",
        ),
        pytest.param(
            "mistral_window48_head64_gqa4_tied",
            overlapped(split="token", num_ubatches=3, norm_vector_cores=4),
            id="three_parts_window",
        ),
        pytest.param(
            MODEL,
            {**overlapped(split="token"), "pipeline_parallel_size": 2},
            id="token_pipeline2",
        ),
        pytest.param(
            "qwen3_moe_unnormalized_top3_of_16",
            {**overlapped(split="token", norm_vector_cores=4), "enable_expert_parallel": True},
            id="token_expert2",
        ),
        pytest.param(
            "deepseek_v3_moe",
            {
                **overlapped(split="token"),
                "max_num_batched_tokens": 96,
                "max_num_seqs": 16,
                "block_size": 256,
            },
            id="token_chunked_latent_experts_blocks256",
        ),
    ],
)
def test_tokens_are_those_of_whole_steps(
    model: str,
    options: dict[str, Any],
    zoo: Callable[[str], Path],
    reference: Callable[[str], TransformersReference],
    start_engine: Callable[..., EngineProcess],
    prompts: list[list[int]],
):
    with start_engine(zoo(model), **TWO_RANKS, **options) as engine:
        outputs = engine.generate(as_inputs(prompts[:32]), GREEDY)
        counts = decisions(engine)
    assert counts["split"] > 10
    assert_greedy(reference(model), prompts[:32], outputs, MAX_TOKENS)


# --- when a step is split ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(zoo: Callable[[str], Path], start_engine: Callable[..., EngineProcess]) -> EngineProcess:
    """Overlap asked for by vLLM's own flag, with default thresholds."""
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
def test_the_first_step_is_split_or_not_by_its_tokens(
    lengths: list[int],
    reason: str,
    engine: EngineProcess,
    reference: Callable[[str], TransformersReference],
):
    before = decisions(engine)
    prompts = random_prompts(sum(lengths), lengths)
    outputs = engine.generate(as_inputs(prompts), FIRST_TOKEN)
    assert decisions(engine) - before == Counter({reason: 1})
    assert_greedy(reference(MODEL), prompts, outputs, 1)


def test_decodes_stay_whole_unless_asked_for(engine: EngineProcess):
    before = decisions(engine)
    engine.generate(as_inputs(random_prompts(1, [5] * 60)), GREEDY)
    given = decisions(engine) - before
    assert given["no_prefill"] == MAX_TOKENS - 1
    assert given["split"] == 1


@pytest.mark.thorough
def test_prefills_and_decodes_are_split_from_their_own_thresholds_on(
    zoo: Callable[[str], Path],
    start_engine: Callable[..., EngineProcess],
    reference: Callable[[str], TransformersReference],
):
    options = {"enabled": True, "decode": True, "min_total_tokens_to_split": 2}
    with start_engine(zoo(MODEL), **TWO_RANKS, additional_config={"dbo": options}) as engine:
        for lengths, reason in (([32, 32], "split"), ([32, 31], "few_prefill_tokens")):
            before = decisions(engine)
            prompts = random_prompts(sum(lengths), lengths)
            outputs = engine.generate(as_inputs(prompts), FIRST_TOKEN)
            assert decisions(engine) - before == Counter({reason: 1})
            assert_greedy(reference(MODEL), prompts, outputs, 1)
        for count, reason in ((32, "split"), (31, "few_tokens")):
            before = decisions(engine)
            prompts = random_prompts(count, [5] * count)
            outputs = engine.generate(as_inputs(prompts), GREEDY)
            # Prefills have enough tokens with both.
            expected = Counter({"split": 1}) + Counter({reason: MAX_TOKENS - 1})
            assert decisions(engine) - before == expected
            assert_greedy(reference(MODEL), prompts, outputs, MAX_TOKENS)


def test_a_prefix_that_this_very_step_fills_is_not_cut_off_from_its_readers(
    engine: EngineProcess, reference: Callable[[str], TransformersReference]
):
    # All four are admitted at once: the first one fills the block that the others read.
    prefix = random_prompts(7, [128])[0]
    prompts = [prefix + random_prompts(seed, [100])[0] for seed in range(4)]
    outputs = engine.generate(as_inputs(prompts), FIRST_TOKEN)
    assert sum(output.num_cached_tokens for output in outputs) >= 128
    assert_greedy(reference(MODEL), prompts, outputs, 1)


def test_the_log_tells_why(engine: EngineProcess):
    assert "--enable-dbo is served as dbo.enabled = True" in engine.log_text()
    for lengths in ([128, 128], [9, 9]):
        time.sleep(0.2)  # the line comes with a step, when the interval is over
        engine.generate(as_inputs(random_prompts(1, lengths)), FIRST_TOKEN)
    lines = re.findall(r"steps decided on: (.*)", engine.log_text())
    assert "2 requests, 256 tokens, 256 of them prefill, cut at 128" in "\n".join(lines)
    assert lines[-1].endswith("2 requests, 18 tokens, 18 of them prefill)")


def split_steps(server: ServerProcess) -> dict[str, int]:
    """DP rank -> steps that were split."""
    counts = decision_counts(metrics_text(server.url))
    return {engine: n for (engine, reason), n in counts.items() if reason == "split"}


def test_dp_ranks_split_together_and_the_metrics_say_so(
    zoo: Callable[[str], Path],
    reference: Callable[[str], TransformersReference],
    prompts: list[list[int]],
    tmp_path: Path,
):
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

        # Steps of the two DP ranks have to meet, and a request may reach its DP rank late.
        generated: list[tuple[int, list[list[int]]]] = []
        with ThreadPoolExecutor(2) as threads:
            for _ in range(MEETING_LIMIT):
                generated += enumerate(threads.map(complete, (0, 1)))
                if split_steps(server):
                    break
        # The counts of the last steps may be on their way from the workers.
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


# --- any schedule, no race -----------------------------------------------------------------------


def test_every_schedule_gives_the_same_bits_and_none_races(
    zoo: Callable[[str], Path],
    start_engine: Callable[..., EngineProcess],
    prompts: list[list[int]],
):
    answers = {}
    for schedule in ("eager", "fuzz:1", "fuzz:2"):
        with start_engine(
            zoo(MODEL),
            environment={"VNPU_SCHEDULE": schedule, "VNPU_RACES": "raise"},
            **TWO_RANKS,
            **overlapped(split="token"),
            max_logprobs=5,
        ) as engine:
            outputs = engine.generate(as_inputs(prompts[:12]), FIRST_TOKEN)
            assert decisions(engine)["split"] >= 1
        answers[schedule] = [
            [(token, item.logprob) for token, item in completion.logprobs[0].items()]
            for output in outputs
            for completion in output.outputs
        ]
    assert answers["fuzz:1"] == answers["eager"]
    assert answers["fuzz:2"] == answers["eager"]


# --- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param(MODEL, {"async_scheduling": False}, id="synchronous"),
        pytest.param(MODEL, {"async_scheduling": True}, id="asynchronous"),
        pytest.param(
            "deepseek_v3_moe",
            {"enable_expert_parallel": True},
            id="side_streams",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_an_error_in_a_ubatch_is_the_step_s_error_and_the_next_request_is_served(
    model: str,
    options: dict[str, Any],
    zoo: Callable[[str], Path],
    reference: Callable[[str], TransformersReference],
    start_engine: Callable[..., EngineProcess],
    prompts: list[list[int]],
):
    config = overlapped(split="token")["additional_config"]
    if model != MODEL:
        config |= {"overlap": "lean", "sequence_parallel": {"min_tokens": 1}}
    with start_engine(
        zoo(model),
        environment={"VNPU_RACES": "raise"},
        **TWO_RANKS,
        additional_config=config,
        worker_extension_cls="vllm_davinci_testing.engines.failing_worker.FailingWorker",
        **options,
    ) as engine:
        for part in (0, 1):
            engine.on_workers("fail_once_in", part, 1)
            with pytest.raises(EngineError, match=f"planted in ubatch {part}, layer 1"):
                engine.generate(as_inputs(prompts[:4]), FIRST_TOKEN)
            engine.abort_all()
            outputs = engine.generate(as_inputs(prompts[4:8]), GREEDY)
            assert_greedy(reference(model), prompts[4:8], outputs, MAX_TOKENS)


def test_an_error_of_one_rank_ends_every_process_of_the_engine(
    zoo: Callable[[str], Path],
    start_engine: Callable[..., EngineProcess],
    prompts: list[list[int]],
):
    engine = start_engine(
        zoo(MODEL),
        # The engine's core in a process of its own, as in a server.
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        **TWO_RANKS,
        **overlapped(split="token"),
        worker_extension_cls="vllm_davinci_testing.engines.failing_worker.FailingWorker",
    )
    _, *others = engine.processes()
    assert len(others) >= 3
    engine.on_workers("fail_once_in", 1, 1, 1)  # rank 0 waits for rank 1 in a collective then
    with pytest.raises(EngineError, match="EngineDeadError"):
        engine.generate(as_inputs(prompts[:4]), FIRST_TOKEN)
    log = engine.log_text()
    assert "planted in ubatch 1, layer 1" in log
    assert re.search(r"rank 1 \(pid \d+ on host \S+\) failed in execute_model, call", log), log[
        -8000:
    ]
    engine.close()
    assert becomes_true(lambda: not any(process.is_running() for process in others), 60)


# --- fewer collectives ---------------------------------------------------------------------------


# Embedding, attention and MLP of a dense layer, attention of a sparse one, its experts: shared and
# routed ones together, or each. Under `lean` all but the embedding's leave each rank its share.
REDUCTIONS = {
    "off": {"all_reduce": 5},
    "published": {"all_reduce": 6},
    "lean": {"all_reduce": 1, "reduce_scatter": 4},
}


def test_a_schedule_reduces_as_often_as_it_says_and_the_host_waits_no_more_often(
    zoo: Callable[[str], Path], start_engine: Callable[..., EngineProcess]
):
    waits = []
    for schedule, expected in REDUCTIONS.items():
        with start_engine(
            zoo("deepseek_v3_moe"),
            **TWO_RANKS,
            additional_config={"overlap": schedule, "sequence_parallel": {"min_tokens": 1}},
            worker_extension_cls="vllm_davinci_testing.engines.counting_worker.CountingWorker",
        ) as engine:
            # torch_npu waits for the device when a stream's workspace has to grow.
            engine.generate(as_inputs([[4, 5, 6]]), FIRST_TOKEN)
            engine.on_workers("count_collectives")
            engine.generate(as_inputs([[1, 2, 3]]), FIRST_TOKEN)
            waits.append(engine.on_workers("host_waits"))
            for counted in engine.on_workers("collectives"):
                assert {name: n for name, n in counted.items() if "reduce" in name} == expected
    assert waits == waits[:1] * len(REDUCTIONS)


def test_the_host_waits_for_nothing_inside_the_layers_of_a_split_step(
    zoo: Callable[[str], Path], start_engine: Callable[..., EngineProcess]
):
    waits = []
    for options in ({"overlap": "off"}, overlapped(split="token")["additional_config"]):
        with start_engine(
            zoo("deepseek_v3_moe"),
            **TWO_RANKS,
            additional_config=options,
            worker_extension_cls="vllm_davinci_testing.engines.counting_worker.CountingWorker",
        ) as engine:
            engine.generate(as_inputs(random_prompts(4, [40, 40])), FIRST_TOKEN)
            engine.on_workers("count_collectives")
            engine.generate(as_inputs(random_prompts(3, [40, 40])), FIRST_TOKEN)
            waits.append(engine.on_workers("host_waits"))
            split = decisions(engine)["split"]
    assert split == 2
    assert waits[0] == waits[1]


# --- it overlaps -------------------------------------------------------------------------------


def test_one_half_computes_while_the_other_communicates(
    zoo: Callable[[str], Path], start_engine: Callable[..., EngineProcess], tmp_path: Path
):
    # So long that launching the next operator never takes as long.
    pace = "aclnnM=20000,all_reduce=20000"
    with start_engine(
        zoo(MODEL),
        environment={
            "VNPU_SCHEDULE": "threads", "VNPU_PACE": pace, "VNPU_TRACE": str(tmp_path),
        },
        **TWO_RANKS,
        additional_config={
            **overlapped()["additional_config"], "sequence_parallel": {"enabled": False},
        },
    ) as engine:  # fmt: skip
        engine.generate(as_inputs(random_prompts(1, [200] * 4)), FIRST_TOKEN)
        assert decisions(engine)["split"] == 1
    traced = timeline.read([tmp_path])
    for process in traced.processes:
        first, second = (
            [task for task in traced.tasks if (task.process, task.label) == (process, label)]
            for label in ("ubatch 0", "ubatch 1")
        )
        operators = [task for task in second if task.category == "operator"]
        collectives = [task for task in first if task.category == "collective"]
        assert len(collectives) > 2
        for collective in collectives[1:]:  # under the first there is one short look-up
            begin, end = collective.busy
            assert any(task.begin < end and task.end > begin for task in operators), collective
        # Whatever communicates does nothing else.
        streams = {task.stream for task in first + second if task.category == "collective"}
        assert {task.category for task in first + second if task.stream in streams} <= {
            "collective",
            "copy",
            "event",
        }
