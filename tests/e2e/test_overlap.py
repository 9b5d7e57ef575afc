"""Dual-batch overlap: the tokens of whole steps, in every schedule, without a race."""

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
from vllm_davinci.vnpu import timeline
from vllm_davinci_testing.engines.engine_process import EngineError, EngineProcess
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

# --- exact tokens ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param(MODEL, overlapped(), id="request", marks=pytest.mark.thorough),
        pytest.param(
            "qwen3_norm_head128_gqa2",
            {
                **overlapped(split="token"),
                "max_num_batched_tokens": 96,
                "max_num_seqs": 16,
                # Block tables use 256-token blocks; ubatches also need their own table of operator
                # blocks.
                "block_size": 256,
                "environment": {"VNPU_RACES": "raise", "VNPU_SCHEDULE": "fuzz:7"},
            },
            id="token_chunked_qwen3_blocks256",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            "mistral_window48_head64_gqa4_tied",
            overlapped(split="token", num_ubatches=3, norm_vector_cores=4),
            id="three_parts_window",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            MODEL,
            {**overlapped(split="token"), "pipeline_parallel_size": 2},
            id="token_pipeline2",
            marks=pytest.mark.thorough,
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
def test_tokens_equal_those_of_whole_steps(model, options, exact_engine, prompts):
    with exact_engine(model, prompts[:32], MAX_TOKENS, **TWO_RANKS, **options) as engine:
        counts = decisions(engine)
    assert counts["split"] > 10


# --- any schedule, no race -----------------------------------------------------------------------


def test_every_schedule_gives_the_same_bits_and_none_races(zoo, start_engine, prompts):
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
        pytest.param(
            MODEL, {"async_scheduling": False}, id="synchronous", marks=pytest.mark.thorough
        ),
        pytest.param(
            MODEL,
            {"async_scheduling": True},
            id="asynchronous",
            marks=pytest.mark.nightly("faults"),
        ),
        pytest.param(
            "deepseek_v3_moe",
            {"enable_expert_parallel": True},
            id="side_streams",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_an_error_in_a_ubatch_is_the_step_s_error_and_the_next_request_is_served(
    model, options, zoo, reference, start_engine, prompts
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


def test_an_error_of_one_rank_ends_every_process_of_the_engine(zoo, start_engine, prompts):
    engine = start_engine(
        zoo(MODEL),
        # Run the engine core in its own process, as a server does.
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        **TWO_RANKS,
        **overlapped(split="token"),
        worker_extension_cls="vllm_davinci_testing.engines.failing_worker.FailingWorker",
    )
    _, *others = engine.processes()
    assert len(others) >= 3
    engine.on_workers("fail_once_in", 1, 1, 1)  # rank 0 waits for rank 1 in a collective
    with pytest.raises(EngineError, match="EngineDeadError"):
        engine.generate(as_inputs(prompts[:4]), FIRST_TOKEN)
    log = engine.log_text()
    assert "planted in ubatch 1, layer 1" in log
    assert re.search(r"rank 1 \(pid \d+ on host \S+\) failed in execute_model, call", log), log[
        -8000:
    ]
    engine.close()
    assert becomes_true(lambda: not any(process.is_running() for process in others), 60)


# When dual-batch overlap splits a step; log and metrics report it.

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


# Split steps launch the expected collectives, each during the other half's work.

# One reduction each for the embedding, the dense layer's attention and MLP, the sparse layer's
# attention, and its shared and routed experts (together or separately). `lean` uses reduce-scatter
# for all but the embedding.
REDUCTIONS = {
    "off": {"all_reduce": 5},
    "published": {"all_reduce": 6},
    "lean": {"all_reduce": 1, "reduce_scatter": 4},
}


@pytest.mark.nightly("layouts")
def test_a_schedule_reduces_as_often_as_it_says_and_the_host_waits_no_more_often(zoo, start_engine):
    waits = []
    for schedule, expected in REDUCTIONS.items():
        with start_engine(
            zoo("deepseek_v3_moe"),
            **TWO_RANKS,
            additional_config={"overlap": schedule, "sequence_parallel": {"min_tokens": 1}},
            worker_extension_cls="vllm_davinci_testing.engines.counting_worker.CountingWorker",
        ) as engine:
            # torch_npu waits for the device when a stream's workspace must grow: let it grow first.
            engine.generate(as_inputs([[4, 5, 6]]), FIRST_TOKEN)
            engine.on_workers("count_collectives")
            engine.generate(as_inputs([[1, 2, 3]]), FIRST_TOKEN)
            waits.append(engine.on_workers("host_waits"))
            for counted in engine.on_workers("collectives"):
                assert {name: n for name, n in counted.items() if "reduce" in name} == expected
    assert waits == waits[:1] * len(REDUCTIONS)


@pytest.mark.nightly("layouts")
def test_the_host_waits_for_nothing_inside_the_layers_of_a_split_step(zoo, start_engine):
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


def test_one_half_computes_while_the_other_communicates(zoo, start_engine, tmp_path):
    # Longer than the host ever takes to launch the next operator.
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
        covered = [
            any(task.begin < end and task.end > begin for task in operators)
            for begin, end in (each.busy for each in collectives[1:])
        ]  # the first collective overlaps only a short look-up
        # Without overlap no collective is covered; a busy host launches some operators too late.
        assert sum(covered) > 0.3 * len(covered), covered
        # Streams with collectives run nothing else.
        streams = {task.stream for task in first + second if task.category == "collective"}
        assert {task.category for task in first + second if task.stream in streams} <= {
            "collective",
            "copy",
            "event",
        }
