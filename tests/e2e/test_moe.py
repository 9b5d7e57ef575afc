"""Mixtures of experts: tokens are those of transformers however the experts are spread."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from e2e.engine_process import EngineProcess
from e2e.transformers_reference import TransformersReference, assert_greedy

MAX_TOKENS = 32
NUM_PROMPTS = 32

TOP2 = "qwen3_moe_softmax_top2_of_8"
TOP3 = "qwen3_moe_unnormalized_top3_of_16"
V2 = "deepseek_v2_moe"
V3 = "deepseek_v3_moe"


def assert_tokens(
    engine: EngineProcess, reference: TransformersReference, prompts: list[list[int]]
) -> None:
    prompts = prompts[:NUM_PROMPTS]
    outputs = engine.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True),
    )
    assert_greedy(reference, prompts, outputs, MAX_TOKENS)


@pytest.mark.parametrize("model", [TOP2, TOP3, V2, V3])
def test_tokens_are_those_of_transformers(
    model: str,
    zoo: Callable[[str], Path],
    reference: Callable[[str], TransformersReference],
    start_engine: Callable[..., EngineProcess],
    prompts: list[list[int]],
):
    with start_engine(zoo(model)) as engine:
        assert_tokens(engine, reference(model), prompts)


@pytest.mark.parametrize(
    ("model", "ranks"),
    [
        pytest.param(TOP2, {"tensor_parallel_size": 2}, id="tensor2"),
        pytest.param(
            TOP3, {"tensor_parallel_size": 2, "enable_expert_parallel": True}, id="expert2"
        ),
        pytest.param(
            TOP2,
            {
                "tensor_parallel_size": 4,
                "additional_config": {"expert_tensor_parallel_size": 2},
            },
            id="tensor4_expert_tensor2",
        ),
    ],
)
def test_tokens_of_several_ranks_are_those_of_transformers(
    model: str,
    ranks: dict[str, Any],
    zoo: Callable[[str], Path],
    reference: Callable[[str], TransformersReference],
    start_engine: Callable[..., EngineProcess],
    prompts: list[list[int]],
):
    with start_engine(zoo(model), distributed_executor_backend="mp", **ranks) as engine:
        assert_tokens(engine, reference(model), prompts)
