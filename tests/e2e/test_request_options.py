"""Requests with thinking budgets, traces, and the user's logits processors."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from vllm_davinci_testing.engines.engine_process import EngineError, EngineProcess
from vllm_davinci_testing.engines.generating import tokens_of
from vllm_davinci_testing.engines.logits_processor import ARGUMENT, OnlyToken

MODEL = "llama_head64_gqa4"
RACES = {"VNPU_RACES": "raise"}


@pytest.fixture(scope="module")
def engine(zoo: Callable[[str], Path], start_engine: Callable[..., EngineProcess]) -> EngineProcess:
    """An engine with all options that greedy requests may use."""
    return start_engine(
        zoo(MODEL),
        environment=RACES,
        logits_processors=[OnlyToken],
        enable_trace_replay=True,
        reasoning_config={"reasoning_start_str": "<", "reasoning_end_str": ">!"},
    )


def test_a_users_processor_changes_the_requests_that_ask_for_it(engine: EngineProcess):
    def asking(token: int | None) -> SamplingParams:
        chosen = None if token is None else {ARGUMENT: token}
        return SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, extra_args=chosen)

    given = [{"prompt_token_ids": [number, 5, 9]} for number in range(4)]
    usual = tokens_of(engine.generate(given, asking(None)))
    changed = tokens_of(engine.generate(given, [asking(each) for each in (7, None, 0, None)]))
    assert changed == [[7] * 9, usual[1], [0] * 9, usual[3]]
    with pytest.raises(EngineError, match="only_token = -3 is no token"):
        engine.generate(given[:1], asking(-3))


def test_reasoning_ends_where_its_budget_is_used_up(engine: EngineProcess):
    """The random model never emits the end marker: it is forced, then generation continues."""
    start, end, end_after = (ord(each) - ord("!") for each in "<>!")  # the zoo's vocabulary
    prompt = {"prompt_token_ids": [72, start, 65]}
    free = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    (usual,) = tokens_of(engine.generate([prompt], free))
    assert end not in usual[:8]
    for budget in (0, 1, 6):
        bounded = SamplingParams(
            temperature=0, max_tokens=20, ignore_eos=True, thinking_token_budget=budget
        )
        both = engine.generate([prompt, prompt], [bounded, free])
        tokens, others = tokens_of(both)
        before = max(budget - 1, 0)  # the prompt contains one thinking token
        assert tokens[:before] == usual[:before]
        assert tokens[before : before + 2] == [end, end_after]
        assert others == usual


def test_a_trace_replaces_sampled_tokens(engine: EngineProcess):
    """Logprobs belong to the trace's tokens; the request ends with the trace."""
    given = [{"prompt_token_ids": [number, 5, 9]} for number in range(2)]
    trace = [3, 99, 42, 7]

    def asking(**options: Any) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2, **options)

    traced, other = engine.generate(given, [asking(trace_decode_token_ids=trace), asking()])
    assert tokens_of([traced]) == [trace]
    prompt = [*given[0]["prompt_token_ids"], *trace]
    (scored,) = engine.generate(
        [{"prompt_token_ids": prompt}],
        SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0),
    )
    for place, token in enumerate(trace):
        found = traced.outputs[0].logprobs[place][token].logprob
        expected = scored.prompt_logprobs[3 + place][token].logprob
        assert math.isclose(found, expected, abs_tol=1e-4)
    assert tokens_of([other]) == tokens_of(engine.generate(given[1:], asking()))


def test_a_sampled_token_comes_with_the_tokens_that_were_allowed(zoo, start_engine):
    with start_engine(
        zoo(MODEL), environment=RACES, return_sampling_mask=True, logprobs_mode="processed_logprobs"
    ) as engine:
        kinds = [
            SamplingParams(
                temperature=1.0, top_k=k, top_p=p, max_tokens=6, ignore_eos=True, logprobs=0
            )
            for k, p in ((1, 1.0), (5, 1.0), (40, 0.5), (200, 1.0))
        ]
        outputs = engine.generate([{"prompt_token_ids": [1, 2, 3]}] * 4, kinds)
    for output, kind in zip(outputs, kinds, strict=True):
        (completion,) = output.outputs
        masks = completion.sampling_mask.token_ids
        assert len(masks) == 6
        for token, mask, logprobs in zip(
            completion.token_ids, masks, completion.logprobs, strict=True
        ):
            assert token in mask and logprobs[token].logprob <= 0
            assert len(set(mask)) == len(mask)
            assert len(mask) == kind.top_k if kind.top_p == 1 else 0 < len(mask) <= kind.top_k
