"""Checks that a pair of engines gives one engine's tokens, however blocks are transferred."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from vllm import SamplingParams

from vllm_davinci_testing.engines.disaggregated import Answer, Pair
from vllm_davinci_testing.engines.engine_process import EngineProcess, chip_for
from vllm_davinci_testing.engines.server_process import SMALL

P = TypeVar("P", bound=Pair)

NUM_TOKENS = 6
BLOCK_TOKENS = 128
# Prompts are chunked at 200 tokens, in the middle of blocks.
OPTIONS = (*SMALL, "--max-num-batched-tokens=200", "--max-model-len=768")
OF_ONE = {"max_model_len": 768, "max_num_batched_tokens": 200}
# Options of a pair and of one engine, for checkpoints with few positions.
SHORT = ("--max-model-len=320",), {"max_model_len": 320}
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)
RACES = {"VNPU_RACES": "raise", "VNPU_SCHEDULE": "fuzz:3"}
# Prompts shorter than a block, of one whole block, and chunked inside blocks.
LENGTHS = (5, 128, 389)
# Prompts of `assert_bits_of_one_engine`.
WHOLE_BLOCKS_AND_ONE = (BLOCK_TOKENS + 1, 2 * BLOCK_TOKENS + 1)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [3 + (i * 7 + length + 31 * seed) % 97 for i in range(length)]


def prompts_that_share_blocks() -> list[list[int]]:
    """Returns prompts; both engines have cached the first blocks of the second half."""
    prompts = [prompt_of(140 + n, seed=n % 2) for n in range(4)]
    return prompts + [[*prompt[:BLOCK_TOKENS], *prompt_of(90, seed=9)] for prompt in prompts]


@contextmanager
def pairs_of(kind: type[P], new_folder: Callable[[str], Path]) -> Iterator[Callable[..., P]]:
    """Yields a function that starts pairs, which end with the context."""
    started: list[P] = []

    def start(model: Path, *options: str, **settings: Any) -> P:
        settings = {"environment": RACES, **settings}
        started.append(kind(model, new_folder("pair"), *OPTIONS, *options, **settings))
        started[-1].wait_until_ready()
        return started[-1]

    try:
        yield start
    finally:
        for pair in started:
            pair.close()


def answers_of_one(start_engine: Callable[..., EngineProcess]) -> Callable[..., Answer]:
    """Returns a function that gets answers from one engine per model and options."""
    engines: dict[str, EngineProcess] = {}

    def answer(model: Path, prompt: list[int], **options: Any) -> Answer:
        key = f"{model} {options}"
        if key not in engines:
            engines[key] = start_engine(model, **{**OF_ONE, **options})
        (output,) = engines[key].generate([{"prompt_token_ids": prompt}], GREEDY)
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        places = zip(tokens, completion.logprobs, strict=True)
        return Answer(tokens, [entries[token].logprob for token, entries in places])

    return answer


def assert_bits_of_one_engine(pair: Pair, alone: Callable[[list[int]], Answer]) -> None:
    """Compares tokens and logprobs for prompts of whole blocks and one more token. The single
    engine gets each prompt twice: the second time it has the blocks and computes only the last
    token, like a decode engine.
    """
    for number, length in enumerate(WHOLE_BLOCKS_AND_ONE, start=51):
        prompt = prompt_of(length, seed=number)
        alone(prompt)
        assert pair.complete(prompt, NUM_TOKENS) == alone(prompt)


def assert_shares_blocks(pair: Pair, alone: Callable[[list[int]], Answer]) -> None:
    """Checks prompts whose first blocks are cached, but not in every cache group."""
    prompts = [prompt_of(length) for length in (1, 5, 131)] + prompts_that_share_blocks()
    answers = [pair.complete(prompt, NUM_TOKENS).tokens for prompt in prompts]
    assert answers == [alone(prompt).tokens for prompt in prompts]


def pair_with_bits_of_one_engine(
    start_pair: Callable[..., P],
    alone: Callable[..., Answer],
    model: Path,
    *options: str,
    ranks: int = 1,
    **of_one: Any,
) -> P:
    """Starts a pair that passes `assert_bits_of_one_engine`. of_one: options of that engine"""
    environment = {**RACES, **chip_for(of_one.get("dtype", "float32"))}
    pair = start_pair(model, f"-tp={ranks}", *options, environment=environment)
    of_one = {"tensor_parallel_size": ranks, **of_one}
    assert_bits_of_one_engine(pair, partial(alone, model, **of_one))
    return pair


def assert_computed_again(
    pair: Pair,
    alone: Callable[[list[int]], Answer],
    come: Callable[[], float],
    counts: Callable[[list[int]], int],
    limit_s: float,
) -> None:
    """Suspends, resumes, kills and restarts a prefill engine; asserts a single engine's tokens.

    come:    returns the amount received from the other engine so far
    counts:  returns that amount for one prompt
    limit_s: time after which a transfer is given up
    """
    prompts = [prompt_of(length, seed=40) for length in (300, 301, 302, 303)]
    expected = [alone(prompt).tokens for prompt in prompts]
    told = pair.prefill(prompts[0])
    pair.stop_prefills()
    try:
        begin = time.monotonic()
        assert pair.decode(prompts[0], told, NUM_TOKENS).tokens == expected[0]
        assert time.monotonic() - begin < limit_s + 20
    finally:
        pair.continue_prefills()
    # The other engine may now write pages that are no longer waited for.
    assert pair.complete(prompts[1], NUM_TOKENS).tokens == expected[1]

    told = pair.prefill(prompts[2])
    pair.prefills.kill()
    assert pair.decode(prompts[2], told, NUM_TOKENS).tokens == expected[2]
    pair.restart_prefills()
    before = come()
    assert pair.complete(prompts[3], NUM_TOKENS).tokens == expected[3]
    assert come() == before + counts(prompts[3]), pair.decodes.tail()


def assert_ends_with_an_error(pair: Pair, alone: Callable[[list[int]], Answer]) -> None:
    """Checks a request whose blocks do not arrive, under the policy "fail"; closes the pair."""
    prompt = prompt_of(300)
    told = pair.prefill(prompt)
    pair.prefills.kill()
    with pytest.raises(httpx.HTTPStatusError) as failure:
        pair.decode(prompt, told, NUM_TOKENS)
    assert failure.value.response.status_code == 500
    pair.restart_prefills()
    assert pair.complete(prompt, NUM_TOKENS).tokens == alone(prompt).tokens
    pair.close()


def assert_sizes_are_refused(pair: Pair, alone: Callable[[list[int]], Answer]) -> None:
    """Checks a prefill engine of two ranks with a decode engine of one; closes the pair."""
    prompt = prompt_of(200)
    assert pair.complete(prompt, NUM_TOKENS).tokens == alone(prompt).tokens
    assert "has --tensor-parallel-size 2, and this one 1" in pair.decodes.log_text()
    pair.close()


# Settings under which a pair does not serve, and the outcome.
FAILURES = [
    pytest.param({"policy": "fail"}, assert_ends_with_an_error, id="blocks_that_do_not_come"),
    pytest.param({"of_prefills": ("-tp=2",)}, assert_sizes_are_refused, id="other_sizes"),
]
