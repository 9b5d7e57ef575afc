"""Pipeline stages whose steps are scheduled ahead, which vLLM's V2 runner alone does."""

from __future__ import annotations

import json
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from vllm_davinci_testing.engines.fixture_types import Prompts, Reference, StartEngine, Zoo
from vllm_davinci_testing.engines.transformers_reference import assert_greedy

MODEL = "llama_head64_gqa4"
MAX_TOKENS = 40
ON_V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


@pytest.mark.parametrize(
    ("environment", "options"),
    [
        pytest.param(
            {"VNPU_RACES": "raise"},
            {"max_num_batched_tokens": 224, "enforce_eager": False, "max_num_seqs": 16},
            id="graphs",
        ),
        pytest.param(
            {"VNPU_RACES": "raise", "VNPU_SCHEDULE": "fuzz:52"},
            {"max_num_batched_tokens": 224, "max_num_seqs": 16, "kv_cache_memory_bytes": 2 << 20},
            id="preempted",
        ),
        pytest.param(
            {}, {"tensor_parallel_size": 2}, id="tensor_parallel", marks=pytest.mark.thorough
        ),
    ],
)
def test_stages_with_three_steps_in_flight_give_the_tokens_of_one_device(
    environment: dict[str, str],
    options: dict[str, Any],
    zoo: Zoo,
    reference: Reference,
    start_engine: StartEngine,
    prompts: Prompts,
):
    """Structured output among them, which needs a step's tokens before the next one's masks."""
    with start_engine(
        zoo(MODEL),
        environment={**ON_V2, **environment},
        pipeline_parallel_size=2,
        distributed_executor_backend="mp",
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
        **options,
    ) as engine:
        usual = engine.scheduler_settings()
        assert usual["async_scheduling"] and usual["max_concurrent_batches"] == 3
        greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
        constrained = SamplingParams(
            temperature=0,
            max_tokens=MAX_TOKENS,
            structured_outputs=StructuredOutputsParams(json=SCHEMA),
        )
        kinds = [constrained if number % 4 == 3 else greedy for number in range(24)]
        given = [{"prompt_token_ids": prompt} for prompt in prompts[:24]]
        outputs = engine.generate(given, kinds)
        again = engine.generate(given, kinds)
    for first, second in zip(outputs, again, strict=True):
        assert first.outputs[0].token_ids == second.outputs[0].token_ids
    free = [number for number in range(24) if kinds[number] is greedy]
    assert_greedy(
        reference(MODEL), [prompts[n] for n in free], [outputs[n] for n in free], MAX_TOKENS
    )
    finished = [o.outputs[0] for o, kind in zip(outputs, kinds, strict=True) if kind is constrained]
    whole = [each.text for each in finished if each.finish_reason == "stop"]
    assert whole
    for text in whole:
        assert set(json.loads(text)) == {"name", "age"}
