"""An engine's greedy tokens, compared with transformers'."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from vllm_davinci_testing.engines.engine_process import EngineProcess
from vllm_davinci_testing.engines.transformers_reference import TransformersReference, assert_greedy

RACES = {"VNPU_RACES": "raise"}
FUZZED = {**RACES, "VNPU_SCHEDULE": "fuzz:3"}
COMPOSED = {"additional_config": {"enable_compiled_operators": False}}
TWO_STAGES = {"distributed_executor_backend": "mp", "pipeline_parallel_size": 2}
TWO_RANKS = {"distributed_executor_backend": "mp", "tensor_parallel_size": 2}
# Chunks of prompts run beside decodes; steps of decodes use graphs.
IN_PARTS = {
    "enforce_eager": False,
    "async_scheduling": True,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 16,
}


def paths(
    thorough: Mapping[str, Mapping[str, Any]], nightly: Mapping[str, Any] = IN_PARTS
) -> list[Any]:
    """Returns test parameters: a path's options for nightly runs, and thorough paths by name."""
    return [
        pytest.param(nightly, id="in_parts", marks=pytest.mark.nightly("layouts")),
        *(
            pytest.param(each, id=name, marks=pytest.mark.thorough)
            for name, each in thorough.items()
        ),
    ]


EVERY_PATH = paths(
    {
        "whole": {},
        "synchronous": {"async_scheduling": False},
        "tensor2_in_parts": {**TWO_RANKS, **IN_PARTS},
        "tensor4": {**TWO_RANKS, "tensor_parallel_size": 4},
        "expert2": {**TWO_RANKS, "enable_expert_parallel": True},
    }
)


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Makes prompts of these lengths from 256 distinct tokens."""
    generator = random.Random(seed)
    return [[generator.randrange(256) for _ in range(length)] for length in lengths]


def assert_same_on_every_path(
    engine: EngineProcess,
    reference: TransformersReference,
    lengths: Sequence[int],
    max_tokens: int,
    options: Mapping[str, Any],
) -> None:
    """Asserts that the engine continues prompts like transformers, and replays graphs if it has
    any.
    """
    assert_generates(engine, reference, random_prompts(lengths), max_tokens)
    replays = [sum(each.values()) for each in engine.on_workers("graph_replays")]
    assert all(replays) if "enforce_eager" in options else not any(replays)


def tokens_of(outputs: Sequence[Any]) -> list[list[int]]:
    """Returns the token ids of every completion of every request."""
    return [list(completion.token_ids) for output in outputs for completion in output.outputs]


def greedy_tokens(
    engine: EngineProcess, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[list[int]]:
    """Returns the likeliest tokens after each prompt, also after an end of text."""
    greedy = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return tokens_of(engine.generate(as_inputs(prompts), greedy))


def as_inputs(prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": list(prompt)} for prompt in prompts]


def assert_generates(
    engine: EngineProcess,
    reference: TransformersReference,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
) -> None:
    """Asserts that the engine continues all prompts like transformers."""
    greedy = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    outputs = engine.generate(as_inputs(prompts), greedy)
    assert_greedy(reference, prompts, outputs, max_tokens)


def bits(
    engine: EngineProcess, prompts: Sequence[Sequence[int]], adapter: LoRARequest | None = None
) -> list[Any]:
    """Generates 16 greedy tokens per prompt with logprobs; every other request uses the adapter."""
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=3)
    asked = {} if adapter is None else {"lora_request": [None, adapter] * (len(prompts) // 2)}
    return tokens_and_logprobs(engine.generate(as_inputs(prompts), greedy, **asked))


def tokens_and_logprobs(outputs: Sequence[Any]) -> list[Any]:
    """Returns each output's tokens, and the likeliest logprobs at each position."""
    return [
        (
            list(output.outputs[0].token_ids),
            [{t: p.logprob for t, p in each.items()} for each in output.outputs[0].logprobs],
        )
        for output in outputs
    ]
