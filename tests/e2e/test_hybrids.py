"""Models with recurrent state: transformers' tokens on every path of a step."""

from typing import Any

import pytest
from vllm import SamplingParams

from vllm_davinci_testing.engines.fixture_types import Engines, Prompts, Reference, StartEngine, Zoo
from vllm_davinci_testing.engines.generating import (
    FUZZED,
    IN_PARTS,
    RACES,
    TWO_RANKS,
    TWO_STAGES,
    assert_generates,
)
from vllm_davinci_testing.engines.preemption import COUNTED, assert_no_layer_waits, few_blocks

# Three recurrent layers per attention layer; experts, and a dense layer.
NEXT = "qwen3_next_moe"
# A recurrent state is larger than the smallest block of keys and values.
LARGE = "qwen3_next_large_state"
DENSE = "qwen3_5_dense"
# Mamba2 with two groups, and attention.
NEMOTRON = "nemotron_h"
OTHERS = (
    *("qwen3_5_moe", "nemotron_h_moe", "granite_hybrid_moe", "kimi_linear", "olmo_hybrid"),
    NEMOTRON,
)
WITH_EXPERTS = (NEXT, "nemotron_h_moe", "granite_hybrid_moe", "kimi_linear")

MAX_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
FOUR_RANKS = {"distributed_executor_backend": "mp", "tensor_parallel_size": 4}


@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param(NEXT, IN_PARTS, id="next_in_parts"),
        pytest.param(LARGE, IN_PARTS, id="large_in_parts", marks=pytest.mark.thorough),
        pytest.param(DENSE, TWO_RANKS, id="dense_tensor2", marks=pytest.mark.thorough),
        pytest.param(NEMOTRON, IN_PARTS, id="nemotron_in_parts", marks=pytest.mark.thorough),
        pytest.param(
            "granite_hybrid_moe", FOUR_RANKS, id="granite_tensor4", marks=pytest.mark.thorough
        ),
        *(
            pytest.param(model, options, id=f"{model}_{name}", marks=pytest.mark.thorough)
            for name, options in {
                "whole": {},
                "tensor2_in_parts": {**TWO_RANKS, **IN_PARTS},
                "pipeline2": TWO_STAGES,
            }.items()
            for model in (NEXT, LARGE, DENSE, *OTHERS)
            # For Granite, vLLM's loader looks up the layers of all stages.
            if (model, name) != ("granite_hybrid_moe", "pipeline2")
        ),
        *(
            pytest.param(
                model,
                {**TWO_RANKS, **IN_PARTS, "enable_expert_parallel": True},
                id=f"{model}_expert2",
                marks=pytest.mark.thorough,
            )
            for model in WITH_EXPERTS
        ),
    ],
)
def test_tokens_equal_those_of_transformers_in_any_order_that_events_allow(
    model: str, options: dict[str, Any], exact_engine: Engines, prompts: Prompts
):
    with exact_engine(model, prompts[:16], MAX_TOKENS, environment=FUZZED, **options):
        pass


@pytest.mark.parametrize("model", [NEXT, pytest.param(NEMOTRON, marks=pytest.mark.thorough)])
def test_preempted_requests_give_the_same_tokens_and_no_layer_waits(
    model: str, zoo: Zoo, reference: Reference, start_engine: StartEngine, prompts: Prompts
):
    # Requests outgrow their first block at different times, and the cache has half of the needed
    # blocks.
    chosen = [prompt for prompt in prompts if 105 <= len(prompt) <= 128][:8]
    assert len(chosen) == 8
    with start_engine(zoo(model), environment=RACES, **COUNTED, **few_blocks(22)) as engine:
        steps = assert_no_layer_waits(engine, reference(model), chosen, MAX_TOKENS)
        # Blocks that held recurrent states now hold keys.
        assert_generates(engine, reference(model), prompts[:8], MAX_TOKENS)
        said = engine.log_text()
    assert any(step.tokens > 8 for step in steps) and any(step.tokens <= 8 for step in steps)
    assert "enable_prefix_caching = false" in said and "states of prefixes" in said


@pytest.mark.thorough
def test_states_in_16_bits_are_asked_for_by_name(zoo, reference, start_engine, prompts):
    """Rounding a state after every token changes some tokens, but few."""
    with start_engine(
        zoo(DENSE), environment=RACES, mamba_ssm_cache_dtype="bfloat16", **IN_PARTS
    ) as engine:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts[:16]]
        outputs = [list(each.outputs[0].token_ids) for each in engine.generate(inputs, GREEDY)]
    close, wrong = reference(DENSE).differing_tokens(prompts[:16], outputs)
    assert 0 < close + wrong < 16 * MAX_TOKENS // 10
