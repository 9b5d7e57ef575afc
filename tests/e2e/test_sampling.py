"""Sampling with asynchronous scheduling: the tokens of synchronous steps, and one wait per step.

The wait is for the previous step's tokens, on the output thread.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from vllm_davinci_testing.engines.counting_worker import StepWaits
from vllm_davinci_testing.engines.engine_process import EngineProcess

REQUESTS = 8
TOKENS = 24
OPTIONS = {
    "max_num_seqs": REQUESTS,
    "max_num_batched_tokens": 512,
    "enforce_eager": False,
    "worker_extension_cls": "vllm_davinci_testing.engines.counting_worker.StepCountingWorker",
}
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    "top_k": {"temperature": 0.8, "top_k": 20, "seed": 5},
    "top_p": {"temperature": 0.8, "top_p": 0.7, "seed": 5},
    "top_k_top_p_min_p": {"temperature": 0.9, "top_k": 30, "top_p": 0.8, "min_p": 0.05, "seed": 6},
    "logprobs": {"logprobs": 3},
    "bad_words": {"bad_words": ["self", "return", " the", "import os"]},
    "logit_bias": {"logit_bias": {40: 3.0, 50: -5.0}},
    "min_tokens": {"min_tokens": TOKENS, "stop_token_ids": [326, 722]},
    "allowed": {"allowed_token_ids": list(range(30, 300))},
    "all": {
        "temperature": 0.9,
        "top_k": 30,
        "top_p": 0.8,
        "min_p": 0.05,
        "seed": 7,
        "presence_penalty": 0.7,
        "repetition_penalty": 1.3,
        "logprobs": 2,
        "bad_words": ["self", "import os"],
        "logit_bias": {40: 3.0},
    },
}


def generate(engine: EngineProcess, feature: str) -> list[list[int]]:
    """Generates for requests of different lengths, three quarters of them with the feature."""
    parameters = [
        SamplingParams(
            **{
                "temperature": 0.0,
                "max_tokens": TOKENS + number,
                "ignore_eos": True,
                **(FEATURES[feature] if number % 4 else {}),
            }
        )
        for number in range(REQUESTS)
    ]
    prompts = [f"def read_{number}(self):\n    " for number in range(REQUESTS)]
    outputs = engine.generate(prompts, parameters)
    return [list(output.outputs[0].token_ids) for output in outputs]


def assert_one_wait_each(steps: list[StepWaits]) -> None:
    """Asserts one wait per step, plus two, because waits for two earlier outputs may coincide."""
    assert all(step.in_forward == 0 for step in steps)
    assert sum(step.all for step in steps) <= len(steps) + 2, steps


@pytest.fixture(scope="module")
def asynchronous(start_engine: Callable[..., EngineProcess], tiny_llama: Path) -> EngineProcess:
    engine = start_engine(
        tiny_llama, async_scheduling=True, environment={"VNPU_RACES": "raise"}, **OPTIONS
    )
    engine.on_workers("count_waits_of_steps")
    return engine


@pytest.fixture(scope="module")
def synchronous(start_engine: Callable[..., EngineProcess], tiny_llama: Path) -> EngineProcess:
    engine = start_engine(tiny_llama, async_scheduling=False, **OPTIONS)
    engine.on_workers("count_waits_of_steps")
    return engine


@pytest.mark.parametrize("feature", FEATURES)
def test_tokens_equal_those_of_synchronous_steps_without_additional_waits(
    feature: str, asynchronous: EngineProcess, synchronous: EngineProcess
):
    expected = generate(synchronous, feature)
    assert generate(synchronous, feature) == expected
    asynchronous.on_workers("waits_of_steps")
    assert generate(asynchronous, feature) == expected
    if feature not in ("greedy", "logprobs"):
        assert expected != generate(synchronous, "greedy")
    (steps,) = asynchronous.on_workers("waits_of_steps")
    decodes = [step for step in steps if step.tokens == REQUESTS]
    assert len(decodes) >= TOKENS - 3
    assert_one_wait_each(decodes[2:-2])
    # A decode of the same requests updates positions, lengths, slots, block table and tokens.
    assert max(step.input_launches for step in decodes[2:-2]) <= 5


def test_synchronous_steps_prepare_as_few_copies(synchronous: EngineProcess):
    synchronous.on_workers("waits_of_steps")
    generate(synchronous, "greedy")
    (steps,) = synchronous.on_workers("waits_of_steps")
    decodes = [step for step in steps if step.tokens == REQUESTS]
    assert len(decodes) >= TOKENS - 3
    assert max(step.input_launches for step in decodes[2:-2]) <= 5


def test_random_requests_without_a_seed_wait_no_more(asynchronous: EngineProcess):
    parameters = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=TOKENS, ignore_eos=True)
    asynchronous.on_workers("waits_of_steps")
    asynchronous.generate(["class "] * REQUESTS, parameters)
    (steps,) = asynchronous.on_workers("waits_of_steps")
    assert_one_wait_each([step for step in steps if step.tokens == REQUESTS][2:-2])
