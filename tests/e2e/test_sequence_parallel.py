"""Sequence parallel between attention and MLP: one device's tokens."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import SamplingParams

from vllm_davinci_testing.engines.fixture_types import Prompts, Reference, StartEngine, Zoo
from vllm_davinci_testing.engines.split_settings import SPLIT_ALWAYS
from vllm_davinci_testing.engines.transformers_reference import assert_greedy

MAX_TOKENS = 32


@pytest.mark.parametrize(
    ("model", "min_tokens", "engine"),
    [
        # Every step is sequence parallel, most with padding in the last shard.
        pytest.param(
            "deepseek_v3_dense",
            1,
            {"tensor_parallel_size": 2},
            id="tensor2",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            "deepseek_v3_dense",
            1,
            {"tensor_parallel_size": 4},
            id="tensor4",
            marks=pytest.mark.thorough,
        ),
        # Whole and sequence parallel steps alternate; prompts are chunked.
        pytest.param(
            "deepseek_v3_dense",
            48,
            {"tensor_parallel_size": 2, "max_num_batched_tokens": 64},
            id="tensor2_chunked",
        ),
        pytest.param(
            "deepseek_v3_dense",
            1,
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            id="tensor2_pipeline2",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            "deepseek_v2_lite_dense",
            1,
            {"tensor_parallel_size": 2},
            id="no_query_latent",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_tokens_are_those_of_transformers(
    model: str,
    min_tokens: int,
    engine: dict[str, Any],
    zoo: Zoo,
    reference: Reference,
    start_engine: StartEngine,
    prompts: Prompts,
):
    batch = prompts[:16]
    with start_engine(
        zoo(model),
        distributed_executor_backend="mp",
        additional_config={"sequence_parallel": {"min_tokens": min_tokens}},
        **engine,
    ) as running:
        outputs = running.generate(
            [{"prompt_token_ids": prompt} for prompt in batch],
            SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True),
        )
        log = running.log_text()
    assert f"Steps of {min_tokens} tokens or more run sequence parallel" in log
    assert_greedy(reference(model), batch, outputs, MAX_TOKENS)


@pytest.mark.nightly("layouts")
def test_turned_off_no_step_is_sequence_parallel(
    zoo: Zoo, reference: Reference, start_engine: StartEngine, prompts: Prompts
):
    with start_engine(
        zoo("deepseek_v3_dense"),
        distributed_executor_backend="mp",
        tensor_parallel_size=2,
        additional_config={"sequence_parallel": {"enabled": False, "min_tokens": 1}},
    ) as running:
        outputs = running.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts[:4]],
            SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True),
        )
        log = running.log_text()
    assert "run sequence parallel" not in log
    assert_greedy(reference("deepseek_v3_dense"), prompts[:4], outputs, MAX_TOKENS)


def test_sequence_parallel_steps_are_split_exactly_and_without_a_race(
    zoo: Zoo, reference: Reference, start_engine: StartEngine, prompts: Prompts
):
    # Each half exchanges its shards on its own stream while the other half computes.
    batch = prompts[:12]
    with start_engine(
        zoo("deepseek_v3_moe"),
        environment={"VNPU_SCHEDULE": "fuzz:3", "VNPU_RACES": "raise"},
        distributed_executor_backend="mp",
        tensor_parallel_size=2,
        additional_config={
            "sequence_parallel": {"min_tokens": 1},
            "dbo": {**SPLIT_ALWAYS, "split": "token"},
        },
    ) as running:
        outputs = running.generate(
            [{"prompt_token_ids": prompt} for prompt in batch],
            SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
        )
        counts = running.on_workers("overlap_decisions")[0]
        log = running.log_text()
    assert "run sequence parallel" in log
    assert counts["split"] >= 8
    assert_greedy(reference("deepseek_v3_moe"), batch, outputs, 8)
