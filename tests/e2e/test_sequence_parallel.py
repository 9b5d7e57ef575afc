"""Sequence parallel between attention and MLP gives one device's tokens."""

import pytest

from vllm_davinci_testing.engines.fixture_types import Engines, Prompts
from vllm_davinci_testing.engines.split_settings import SPLIT_ALWAYS

DENSE = "deepseek_v3_dense"
MAX_TOKENS = 32
THOROUGH = pytest.mark.thorough


@pytest.mark.parametrize(
    ("model", "min_tokens", "engine"),
    [
        # Every step is sequence parallel; most pad the last shard.
        pytest.param(DENSE, 1, {"tensor_parallel_size": 2}, id="tensor2", marks=THOROUGH),
        pytest.param(DENSE, 1, {"tensor_parallel_size": 4}, id="tensor4", marks=THOROUGH),
        # Steps with and without sequence parallel alternate; prompts are chunked.
        pytest.param(
            DENSE,
            48,
            {"tensor_parallel_size": 2, "max_num_batched_tokens": 64},
            id="tensor2_chunked",
        ),
        pytest.param(
            DENSE,
            1,
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            id="tensor2_pipeline2",
            marks=THOROUGH,
        ),
        pytest.param(
            *("deepseek_v2_lite_dense", 1, {"tensor_parallel_size": 2}),
            id="no_query_latent",
            marks=THOROUGH,
        ),
    ],
)
def test_tokens_equal_those_of_transformers(model, min_tokens, engine, exact_engine, prompts):
    with exact_engine(
        *(model, prompts[:16], MAX_TOKENS),
        distributed_executor_backend="mp",
        additional_config={"sequence_parallel": {"min_tokens": min_tokens}},
        **engine,
    ) as running:
        log = running.log_text()
    assert f"Steps of {min_tokens} tokens or more run sequence parallel" in log


@pytest.mark.nightly("layouts")
def test_turned_off_no_step_is_sequence_parallel(exact_engine: Engines, prompts: Prompts):
    with exact_engine(
        *(DENSE, prompts[:4], MAX_TOKENS),
        distributed_executor_backend="mp",
        tensor_parallel_size=2,
        additional_config={"sequence_parallel": {"enabled": False, "min_tokens": 1}},
    ) as running:
        log = running.log_text()
    assert "run sequence parallel" not in log


def test_sequence_parallel_steps_are_split_exactly_and_without_a_race(exact_engine, prompts):
    # Each half exchanges its shards on its own stream while the other half computes.
    with exact_engine(
        *("deepseek_v3_moe", prompts[:12], 8),
        environment={"VNPU_SCHEDULE": "fuzz:3", "VNPU_RACES": "raise"},
        distributed_executor_backend="mp",
        tensor_parallel_size=2,
        additional_config={
            "sequence_parallel": {"min_tokens": 1},
            "dbo": {**SPLIT_ALWAYS, "split": "token"},
        },
    ) as running:
        counts = running.on_workers("overlap_decisions")[0]
        log = running.log_text()
    assert "run sequence parallel" in log
    assert counts["split"] >= 8
