"""All kinds of requests to one engine: transformers' tokens."""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

from vllm_davinci_testing.engines.engine_process import EngineProcess
from vllm_davinci_testing.engines.fixture_types import Prompts, Reference
from vllm_davinci_testing.engines.generating import as_inputs, tokens_of
from vllm_davinci_testing.engines.transformers_reference import assert_greedy

MAX_TOKENS = 64
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)

# The model of all tests that compare paths through the engine.
PATHS_MODEL = "llama_head64_gqa4"


# --- the same tokens whatever the path -----------------------------------------------------------


@pytest.fixture(scope="module")
def engine(zoo: Callable[[str], Path], start_engine: Callable[..., EngineProcess]) -> EngineProcess:
    """An engine with vLLM's defaults: asynchronous scheduling, prefix cache, chunked prefill."""
    return start_engine(
        zoo(PATHS_MODEL),
        max_logprobs=20,
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
    )


def test_asynchronous_steps_and_parts_of_prompts_give_the_tokens_of_transformers(
    engine: EngineProcess, reference: Reference, prompts: Prompts
):
    usual = engine.scheduler_settings()
    assert usual["async_scheduling"] and usual["enable_chunked_prefill"]
    outputs = engine.generate(as_inputs(prompts), GREEDY)
    assert_greedy(reference(PATHS_MODEL), prompts, outputs, MAX_TOKENS)


def test_tokens_are_the_same_for_hits_and_misses_of_the_prefix_cache(engine, reference):
    prefix = list(range(100)) + list(range(30, 58))
    prompts = [[*prefix, *range(n, n + 12)] for n in range(0, 160, 20)]
    first = engine.generate(as_inputs(prompts[:1]), GREEDY)
    assert first[0].num_cached_tokens == 0
    outputs = engine.generate(as_inputs(prompts), GREEDY)
    assert [output.num_cached_tokens for output in outputs] == [128] * len(prompts)
    assert_greedy(reference(PATHS_MODEL), prompts, outputs, MAX_TOKENS)
    assert tokens_of(outputs[:1]) == tokens_of(first)


# --- requests ------------------------------------------------------------------------------------


def test_parallel_samples_differ_and_repeat_with_their_seed(engine: EngineProcess):
    prompt = [{"prompt_token_ids": [72, 101, 108, 108, 111]}]
    sampling = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=24, ignore_eos=True)
    alone = tokens_of(engine.generate(prompt, sampling))
    assert len({tuple(tokens) for tokens in alone}) == 3
    others = [{"prompt_token_ids": [n]} for n in range(5)]
    free = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)
    together = engine.generate([*others, *prompt], [free] * 5 + [sampling])
    assert tokens_of(together[-1:]) == alone


def test_sampled_frequencies_follow_the_softmax(engine: EngineProcess, reference: Reference):
    prompt, samples, temperature = [1, 2, 3], 2000, 1.5
    sampling = SamplingParams(n=samples, temperature=temperature, seed=1, max_tokens=1, top_k=4)
    outputs = engine.generate(as_inputs([prompt]), sampling)
    counts = Counter(tokens[0] for tokens in tokens_of(outputs))
    logits = reference(PATHS_MODEL).logits(prompt)[-1]
    values, tokens = logits.topk(4)
    assert set(counts) <= set(tokens.tolist())
    probabilities = (values / temperature).softmax(dim=-1)
    for token, probability in zip(tokens.tolist(), probabilities.tolist(), strict=True):
        # Four standard deviations of a binomial distribution.
        margin = 4 * (samples * probability * (1 - probability)) ** 0.5
        assert counts[token] == pytest.approx(samples * probability, abs=margin)


def test_a_stop_string_ends_the_text_before_it(engine: EngineProcess):
    prompt = [{"prompt_token_ids": [83, 116, 111, 112]}]
    (whole,) = engine.generate(prompt, GREEDY)
    text = whole.outputs[0].text
    stop = next(c for c in text[5:] if c.isascii() and c.isprintable() and c not in text[:5])
    for included in (False, True):
        (output,) = engine.generate(
            prompt,
            SamplingParams(
                temperature=0,
                max_tokens=MAX_TOKENS,
                ignore_eos=True,
                stop=["never \x01 seen", stop],
                include_stop_str_in_output=included,
            ),
        )
        completion = output.outputs[0]
        assert completion.text == text[: text.index(stop)] + stop * included
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_logprobs_equal_those_of_transformers(engine, reference, prompts):
    chosen = prompts[3:9]
    sampling = SamplingParams(
        temperature=0, max_tokens=16, ignore_eos=True, logprobs=5, prompt_logprobs=3
    )
    outputs = engine.generate(as_inputs(chosen), sampling)
    for prompt, output in zip(chosen, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        rows = reference(PATHS_MODEL).logprobs([*prompt, *tokens])
        assert output.prompt_logprobs[0] is None
        seen = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        followers = [*prompt[1:], *tokens]
        for row, follower, candidates in zip(rows, followers, seen, strict=False):
            assert follower in candidates
            assert len(candidates) >= 3
            best = {token for token, entry in candidates.items() if entry.rank <= 3}
            assert best >= set(row.topk(3).indices.tolist())
            for token, entry in candidates.items():
                assert entry.logprob == pytest.approx(float(row[token]), abs=2e-4)


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"choice": ["positive", "negative"]}, r"positive|negative"),
        ({"regex": r"[a-c]{3}-\d{4}"}, r"[a-c]{3}-\d{4}"),
        (
            {
                "json": {
                    "type": "object",
                    "properties": {"colour": {"enum": ["red", "green"]}, "ok": {"type": "boolean"}},
                    "required": ["colour", "ok"],
                    "additionalProperties": False,
                }
            },
            r"\{.*\}",
        ),
        ({"grammar": 'root ::= "a" ("b" | "c") "d"'}, r"a[bc]d"),
    ],
    ids=["choice", "regex", "json", "grammar"],
)
def test_structured_output_has_the_structure(constraint, pattern, engine):
    constrained = SamplingParams(
        temperature=1.0,
        seed=3,
        max_tokens=80,
        structured_outputs=StructuredOutputsParams(**constraint),
    )
    free = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = [{"prompt_token_ids": [n, n + 1]} for n in range(6)]
    alone = tokens_of(engine.generate(prompts[1::2], free))
    outputs = engine.generate(prompts, [constrained, free] * 3)
    for output in outputs[::2]:
        text = output.outputs[0].text
        assert re.fullmatch(pattern, text), text
        if "json" in constraint:
            assert json.loads(text)["colour"] in ("red", "green")
    # One request's mask does not affect other rows of the batch.
    assert tokens_of(outputs[1::2]) == alone


def greedy_tokens(engine: EngineProcess, **options: Any) -> list[int]:
    settings = {"temperature": 0, "max_tokens": 32, "ignore_eos": True, **options}
    (tokens,) = tokens_of(
        engine.generate([{"prompt_token_ids": [11, 22, 33]}], SamplingParams(**settings))
    )
    return tokens


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=str)
def test_sampling_from_one_candidate_is_greedy(options: dict[str, Any], engine: EngineProcess):
    settings = {"temperature": 1.0, "seed": 5, **options}
    assert greedy_tokens(engine, **settings) == greedy_tokens(engine)


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_penalties_choose_as_their_definitions_do(name, engine, reference):
    prompt, penalty = [11, 22, 33], 1.4

    def adjust(logits: torch.Tensor, generated: list[int]) -> torch.Tensor:
        if name == "repetition_penalty":
            seen = torch.tensor(sorted({*prompt, *generated}))
            chosen = logits[seen]
            logits[seen] = torch.where(chosen > 0, chosen / penalty, chosen * penalty)
            return logits
        for token, count in Counter(generated).items():
            logits[token] -= penalty * (count if name == "frequency_penalty" else 1)
        return logits

    tokens = greedy_tokens(engine, **{name: penalty}, max_tokens=64)
    assert tokens[:32] != greedy_tokens(engine)
    assert reference(PATHS_MODEL).first_difference(prompt, tokens, adjust) is None


def test_tokens_can_be_allowed_biased_and_forbidden(engine: EngineProcess):
    free = greedy_tokens(engine)
    assert set(greedy_tokens(engine, allowed_token_ids=[7, 8, 9])) <= {7, 8, 9}
    assert greedy_tokens(engine, logit_bias={5: 100.0}) == [5] * 32
    assert free[0] not in greedy_tokens(engine, logit_bias={free[0]: -100.0})
    # vLLM requires forbidden words as text; a printable ASCII byte is one token.
    tokenizer = {chr(byte): byte - 33 for byte in range(33, 127)}
    word, token = next((c, t) for c, t in tokenizer.items() if t in free)
    assert token not in greedy_tokens(engine, bad_words=[word])


def test_a_stop_token_waits_for_the_smallest_number_of_tokens(engine: EngineProcess):
    free = greedy_tokens(engine)
    stop = free[3]
    first = free.index(stop)
    assert greedy_tokens(engine, stop_token_ids=[stop]) == free[: first + 1]
    waited = greedy_tokens(engine, stop_token_ids=[stop], min_tokens=first + 5)
    assert len(waited) > first + 4
    assert stop not in waited[: first + 4]


def test_logprobs_of_tokens_that_are_named(engine: EngineProcess, reference: Reference):
    prompt, named = [11, 22, 33], [7, 8, 9]
    sampling = SamplingParams(temperature=0, max_tokens=1, logprob_token_ids=named)
    (output,) = engine.generate(as_inputs([prompt]), sampling)
    (candidates,) = output.outputs[0].logprobs
    row = reference(PATHS_MODEL).logprobs(prompt)[-1]
    assert set(candidates) == {*named, int(row.argmax())}
    for token, entry in candidates.items():
        assert entry.logprob == pytest.approx(float(row[token]), abs=2e-4)


def test_a_repetition_ends_the_text(engine: EngineProcess):
    repeated = RepetitionDetectionParams(max_pattern_size=1, min_pattern_size=1, min_count=3)
    options = {"logit_bias": {5: 100.0}, "repetition_detection": repeated}
    assert greedy_tokens(engine, **options) == [5] * 3


def test_every_other_sampling_option_is_accepted(engine: EngineProcess):
    outputs = engine.generate(
        [{"prompt_token_ids": [11, 22, 33]}],
        SamplingParams(
            temperature=0.8,
            top_p=0.9,
            top_k=20,
            max_tokens=4,
            n=1,
            detokenize=False,
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
            stop=None,
            logprobs=0,
            flat_logprobs=True,
            ignore_eos=False,
            skip_reading_prefix_cache=True,
            stream_interval=2,
            extra_args={"any": "thing"},
        ),
    )
    assert 1 <= len(outputs[0].outputs[0].token_ids) <= 4
