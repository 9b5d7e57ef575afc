"""Dual-batch overlap: the tokens of whole steps, in every schedule, without a race."""

import re

import pytest

from vllm_davinci_testing.engines.engine_process import EngineError
from vllm_davinci_testing.engines.generating import TWO_RANKS, as_inputs
from vllm_davinci_testing.engines.split_engines import (
    FIRST_TOKEN,
    GREEDY,
    MAX_TOKENS,
    decisions,
    overlapped,
)
from vllm_davinci_testing.engines.transformers_reference import assert_greedy
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
