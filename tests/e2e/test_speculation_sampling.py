"""Sampling with drafts: options keep greedy tokens unchanged, and seeds reproduce samples."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from vllm_davinci_testing.engines.engine_process import EngineError, EngineProcess
from vllm_davinci_testing.engines.speculating import RACES, SMALL, speculation, told

pytestmark = pytest.mark.nightly("layouts")

Engines = Callable[..., EngineProcess]
REQUESTS = 6
DRAFTS = 3
OPTIONS = {
    "enforce_eager": False,
    "worker_extension_cls": "vllm_davinci_testing.engines.counting_worker.StepCountingWorker",
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
}
GREEDY: dict[str, dict[str, Any]] = {
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    "logprobs": {"logprobs": 3},
    "bad_words": {"bad_words": ["self", "return", " the", "import os"]},
    "allowed": {"allowed_token_ids": list(range(30, 300))},
}
RANDOM: dict[str, dict[str, Any]] = {
    "top_k": {"temperature": 0.8, "top_k": 20},
    "top_p": {"temperature": 0.8, "top_p": 0.7},
    "all": {"temperature": 0.9, "top_k": 30, "top_p": 0.8, "repetition_penalty": 1.2},
}
PATTERN = r"[0-9]{4}-(a|bc){3,6}\."


def generate(engine: EngineProcess, **options: Any) -> list[Any]:
    """Generates for requests with and without the options."""
    parameters = [
        SamplingParams(
            **{"temperature": 0.0, "max_tokens": 24 + n, "ignore_eos": True}
            | (options if n % 3 else {})
        )
        for n in range(REQUESTS)
    ]
    outputs = engine.generate([f"def read_{n}(self):\n    " for n in range(REQUESTS)], parameters)
    return [output.outputs[0] for output in outputs]


def tokens(completions: list[Any]) -> list[list[int]]:
    return [list(each.token_ids) for each in completions]


@pytest.fixture(scope="module")
def plain(start_engine: Engines, tiny_deepseek: Path) -> EngineProcess:
    return start_engine(tiny_deepseek, **SMALL, **OPTIONS)


@pytest.fixture(scope="module")
def speculating(start_engine: Engines, tiny_deepseek: Path) -> EngineProcess:
    return start_engine(tiny_deepseek, environment=RACES, **speculation("mtp", DRAFTS), **OPTIONS)


@pytest.mark.parametrize("feature", GREEDY)
def test_greedy_tokens_stay(feature: str, plain: EngineProcess, speculating: EngineProcess):
    expected, found = generate(plain, **GREEDY[feature]), generate(speculating, **GREEDY[feature])
    assert tokens(found) == tokens(expected)
    if feature != "logprobs":
        assert tokens(expected) != tokens(generate(plain))
        return
    for one, other in zip(found, expected, strict=True):
        for row, wanted in zip(one.logprobs or [], other.logprobs or [], strict=True):
            assert row.keys() == wanted.keys()
            for token, value in row.items():
                assert math.isclose(value.logprob, wanted[token].logprob, abs_tol=1e-4)


@pytest.mark.thorough
def test_synchronous_steps_count_tokens_for_a_minimum(plain, start_engine, tiny_deepseek):
    """With asynchronous scheduling, vLLM counts rejected drafts, too."""
    asked = {"min_tokens": 24, "stop_token_ids": [326, 722]}
    options = {**speculation("mtp", DRAFTS), **OPTIONS, "async_scheduling": False}
    with start_engine(tiny_deepseek, environment=RACES, **options) as engine:
        assert tokens(generate(engine, **asked)) == tokens(generate(plain, **asked))


@pytest.mark.parametrize("feature", RANDOM)
def test_random_tokens_repeat_with_a_seed(feature: str, speculating: EngineProcess):
    asked = {**RANDOM[feature], "seed": 5}
    first = tokens(generate(speculating, **asked))
    assert tokens(generate(speculating, **asked)) == first
    assert tokens(generate(speculating, **asked | {"seed": 6})) != first


def test_structured_output_keeps_its_pattern(plain: EngineProcess, speculating: EngineProcess):
    asked = {
        "structured_outputs": StructuredOutputsParams(regex=PATTERN),
        "ignore_eos": False,
        "max_tokens": 60,
    }
    expected = generate(plain, **asked)
    found = generate(speculating, **asked)
    assert tokens(found) == tokens(expected)
    texts = [each.text for number, each in enumerate(found) if number % 3]
    assert texts and all(re.fullmatch(PATTERN, text) for text in texts)


def test_requests_that_vllm_does_not_support_with_drafts_are_refused(speculating: EngineProcess):
    with pytest.raises(EngineError, match="not yet supported with speculative decoding"):
        generate(speculating, logit_bias={40: 3.0})
    drafted, accepted = told(speculating)
    assert accepted > drafted / 5


def test_the_host_waits_no_more_often_than_without_drafts(speculating: EngineProcess):
    """The host waits once per step, for the tokens: drafter and next step need their number."""
    speculating.on_workers("count_waits_of_steps")
    generate(speculating)
    (steps,) = speculating.on_workers("waits_of_steps")
    decodes = [step for step in steps if step.tokens == REQUESTS * (1 + DRAFTS)][1:-1]
    assert len(decodes) > 4
    assert all(step.in_forward == 0 for step in decodes)
    assert sum(step.all for step in decodes) <= len(decodes) + 2, decodes
