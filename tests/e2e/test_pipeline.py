"""Pipeline stages with steps scheduled ahead give one device's tokens."""

import json
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from vllm_davinci_testing.engines.fixture_types import Engines, Prompts
from vllm_davinci_testing.engines.generating import as_inputs

MODEL = "llama_head64_gqa4"
MAX_TOKENS = 40
STAGES = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
GRAMMARS = {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}
SMALL = {"max_num_batched_tokens": 224, "max_num_seqs": 16}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}

GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)


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
    environment: dict[str, str], options: dict[str, Any], exact_engine: Engines, prompts: Prompts
):
    options = {**STAGES, **options, "environment": environment}
    with exact_engine(MODEL, prompts[:24], MAX_TOKENS, **options) as engine:
        usual = engine.scheduler_settings()
    assert usual["async_scheduling"] and usual["max_concurrent_batches"] == 3


@pytest.mark.thorough
def test_structured_output_of_stages_equals_one_device(zoo, start_engine, prompts):
    """A step's grammar mask needs the previous step's tokens."""
    constrained = SamplingParams(
        temperature=0,
        max_tokens=MAX_TOKENS,
        structured_outputs=StructuredOutputsParams(json=SCHEMA),
    )
    kinds = [constrained if number % 4 == 3 else GREEDY for number in range(24)]
    answers = []
    for options in ({}, STAGES):
        with start_engine(zoo(MODEL), **GRAMMARS, **SMALL, **options) as engine:
            outputs = engine.generate(as_inputs(prompts[:24]), kinds)
            answers.append([list(each.outputs[0].token_ids) for each in outputs])
    assert answers[0] == answers[1]
    whole = [outputs[place].outputs[0] for place in range(3, 24, 4)]
    tokenizer = AutoTokenizer.from_pretrained(zoo(MODEL))
    for answer in whole:
        # Decode here: vLLM's text begins with the invalid UTF-8 of a random prompt.
        text = tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        assert text.startswith('{"name":"')
        if answer.finish_reason == "stop":
            assert set(json.loads(text, strict=False)) == {"name", "age"}, text
    assert any(answer.finish_reason == "stop" for answer in whole)
