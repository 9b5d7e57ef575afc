"""Blocks that Mooncake carries: the tokens of one engine, whatever happens to a transfer."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from vllm import SamplingParams

from vllm_davinci_testing.engines.disaggregated import Answer, MooncakePair, metric
from vllm_davinci_testing.engines.engine_process import EngineProcess, chip_for
from vllm_davinci_testing.engines.server_process import SMALL
from vllm_davinci_testing.processes.waiting import becomes_true

pytest.importorskip(
    "mooncake.engine",
    reason="Mooncake: pip install 'vllm-davinci[mooncake]', and libibverbs1 of the system",
    exc_type=ImportError,
)

THOROUGH = pytest.mark.thorough
NUM_TOKENS = 6
BLOCK_TOKENS = 128
TRANSFER_LIMIT_S = 2
OPTIONS = (*SMALL, "--max-num-batched-tokens=200", "--max-model-len=768")
RACES = {"VNPU_RACES": "raise", "VNPU_SCHEDULE": "fuzz:3"}
SIZES = {"max_model_len": 768, "max_num_batched_tokens": 200}
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)
FAILED = re.compile("pulling kv_caches for .* failed|unsealed")


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [3 + (i * 7 + length + 31 * seed) % 97 for i in range(length)]


@pytest.fixture(scope="module")
def start_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., MooncakePair]]:
    """Starts pairs of engines; they end with the module."""
    started: list[MooncakePair] = []

    def start(model: Path, *options: str, **settings: Any) -> MooncakePair:
        settings = {"environment": RACES, **settings}
        folder = tmp_path_factory.mktemp("pair")
        started.append(MooncakePair(model, folder, *OPTIONS, *options, **settings))
        started[-1].wait_until_ready()
        return started[-1]

    yield start
    for pair in started:
        pair.close()


@pytest.fixture(scope="module")
def alone(start_engine: Callable[..., EngineProcess]) -> Callable[..., Answer]:
    """Answers of one engine that does both."""
    engines: dict[str, EngineProcess] = {}

    def answer(model: Path, prompt: list[int], **options: Any) -> Answer:
        key = f"{model} {options}"
        if key not in engines:
            engines[key] = start_engine(model, **{**SIZES, **options})
        (output,) = engines[key].generate([{"prompt_token_ids": prompt}], GREEDY)
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        places = zip(tokens, completion.logprobs, strict=True)
        return Answer(tokens, [entries[token].logprob for token, entries in places])

    return answer


@pytest.fixture(scope="module")
def pair(tiny_llama: Path, start_pair: Callable[..., MooncakePair]) -> MooncakePair:
    return start_pair(tiny_llama, extra={"transfer_timeout": TRANSFER_LIMIT_S})


def assert_bits_of_one_engine(pair: MooncakePair, alone: Callable[[list[int]], Answer]) -> None:
    """Tokens and logprobs of prompts of whole blocks and a token. One engine, when it is asked for
    them again, has the blocks and computes that token alone, as an engine of decodes does."""
    for blocks in (1, 2):
        prompt = prompt_of(blocks * BLOCK_TOKENS + 1, seed=50 + blocks)
        alone(prompt)
        assert pair.complete(prompt, NUM_TOKENS) == alone(prompt)


def test_two_engines_give_the_tokens_of_one(
    pair: MooncakePair, tiny_llama: Path, alone: Callable[..., Answer]
):
    # Less than a block, a whole one, and pieces of a prompt that end within blocks.
    prompts = [prompt_of(length) for length in (5, 128, 389)]
    before = came(pair)
    for prompt in prompts:
        assert pair.complete(prompt, NUM_TOKENS).tokens == alone(tiny_llama, prompt).tokens
    assert_bits_of_one_engine(pair, lambda prompt: alone(tiny_llama, prompt))
    assert came(pair) - before == sum(map(len, prompts)) + 129 + 257
    assert not FAILED.search(pair.decodes.log_text())


def came(pair: MooncakePair) -> float:
    """Tokens whose keys and values came from the other engine."""
    return metric(pair.decodes, "vllm:external_prefix_cache_hits_total")


@THOROUGH
def test_both_engines_are_asked_at_once_for_several_requests(
    pair: MooncakePair, tiny_llama: Path, alone: Callable[..., Answer]
):
    # The second half begins with blocks that the first has left in both engines' prefix caches.
    prompts = [prompt_of(140 + n, seed=n % 2) for n in range(4)]
    prompts += [[*prompt[:BLOCK_TOKENS], *prompt_of(90, seed=9)] for prompt in prompts]

    def complete(prompt: list[int]) -> Answer:
        told = pair.transfer()
        with ThreadPoolExecutor(1) as prefills:
            prefills.submit(pair.begin_prefill, prompt, told)
            return pair.decode(prompt, told, NUM_TOKENS)

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(complete, prompts))
    assert [each.tokens for each in answers] == [alone(tiny_llama, p).tokens for p in prompts]


def test_blocks_of_another_prompt_are_not_taken_for_the_requests(
    pair: MooncakePair, tiny_llama: Path, alone: Callable[..., Answer]
):
    """The proxy mistakes one prompt's transfer for that of another, as long a one."""
    prompt = prompt_of(330, seed=20)
    told = pair.prefill(prompt_of(330, seed=21))
    assert pair.decode(prompt, told, NUM_TOKENS).tokens == alone(tiny_llama, prompt).tokens
    assert "unsealed" in pair.decodes.log_text()


def test_what_does_not_come_is_computed_again(
    pair: MooncakePair, tiny_llama: Path, alone: Callable[..., Answer]
):
    """An engine of prefills stands still, goes on, is killed, and comes back."""
    prompts = [prompt_of(length, seed=40) for length in (300, 301, 302, 303)]
    expected = [alone(tiny_llama, prompt).tokens for prompt in prompts]
    told = pair.prefill(prompts[0])
    pair.stop_prefills()
    try:
        begin = time.monotonic()
        assert pair.decode(prompts[0], told, NUM_TOKENS).tokens == expected[0]
        assert time.monotonic() - begin < TRANSFER_LIMIT_S + 20
        assert f"not there within {TRANSFER_LIMIT_S} s" in pair.decodes.log_text()
    finally:
        pair.continue_prefills()
    # It writes now what nobody waits for any more.
    assert pair.complete(prompts[1], NUM_TOKENS).tokens == expected[1]

    told = pair.prefill(prompts[2])
    pair.prefills.kill()
    assert pair.decode(prompts[2], told, NUM_TOKENS).tokens == expected[2]
    pair.restart_prefills()
    before = came(pair)
    assert pair.complete(prompts[3], NUM_TOKENS).tokens == expected[3]
    assert came(pair) == before + len(prompts[3]), pair.decodes.tail()


@THOROUGH
def test_a_worker_that_ends_while_it_is_waited_for_is_noticed_at_once(
    tiny_llama: Path, start_pair: Callable[..., MooncakePair], alone: Callable[..., Answer]
):
    pair = start_pair(tiny_llama)  # with vLLM's limit, which is minutes
    prompt = prompt_of(300, seed=70)
    pair.complete(prompt_of(20), NUM_TOKENS)  # after which the engines know each other
    with ThreadPoolExecutor(1) as decodes:
        answer = decodes.submit(pair.decode, prompt, pair.transfer(), NUM_TOKENS)
        time.sleep(2)
        assert not answer.done()  # nobody has computed the prompt
        pair.prefills.kill()
        assert answer.result(30).tokens == alone(tiny_llama, prompt).tokens
    assert "the engine of prefills has ended" in pair.decodes.log_text()
    pair.close()


@THOROUGH
def test_a_request_whose_blocks_do_not_come_ends_with_an_error_where_that_is_asked_for(
    tiny_llama: Path, start_pair: Callable[..., MooncakePair], alone: Callable[..., Answer]
):
    pair = start_pair(tiny_llama, policy="fail")
    prompt = prompt_of(300)
    told = pair.prefill(prompt)
    pair.prefills.kill()
    with pytest.raises(httpx.HTTPStatusError) as failure:
        pair.decode(prompt, told, NUM_TOKENS)
    assert failure.value.response.status_code == 500
    pair.restart_prefills()
    assert pair.complete(prompt, NUM_TOKENS).tokens == alone(tiny_llama, prompt).tokens
    pair.close()


@THOROUGH
def test_engines_of_other_sizes_are_refused_by_name(
    tiny_llama: Path, start_pair: Callable[..., MooncakePair], alone: Callable[..., Answer]
):
    pair = start_pair(tiny_llama, of_prefills=("-tp=2",))
    prompt = prompt_of(200)
    assert pair.complete(prompt, NUM_TOKENS).tokens == alone(tiny_llama, prompt).tokens
    assert "has --tensor-parallel-size 2, and this one 1" in pair.decodes.log_text()
    pair.close()


@THOROUGH
@pytest.mark.parametrize(
    ("name", "ranks", "options", "of_one"),
    [
        pytest.param("tiny_llama", 2, (), {}, id="two_ranks"),
        pytest.param("tiny_deepseek", 1, (), {}, id="mla"),
        pytest.param(
            "tiny_llama", 1, ("--no-enforce-eager",), {"enforce_eager": False}, id="graphs"
        ),
        pytest.param("tiny_llama", 1, ("--dtype=bfloat16",), {"dtype": "bfloat16"}, id="16_bits"),
    ],
)
def test_bits_are_those_of_one_engine(
    name: str,
    ranks: int,
    options: tuple[str, ...],
    of_one: dict[str, Any],
    request: pytest.FixtureRequest,
    start_pair: Callable[..., MooncakePair],
    alone: Callable[..., Answer],
):
    model: Path = request.getfixturevalue(name)
    environment = {**RACES, **chip_for(of_one.get("dtype", "float32"))}
    pair = start_pair(model, f"-tp={ranks}", *options, environment=environment)
    of_one = {"tensor_parallel_size": ranks, **of_one}
    assert_bits_of_one_engine(pair, lambda prompt: alone(model, prompt, **of_one))
    assert came(pair) == 129 + 257
    pair.close()


@THOROUGH
def test_blocks_are_free_again_when_they_have_gone_over_or_nobody_has_come_for_them(
    tiny_llama: Path, start_pair: Callable[..., MooncakePair]
):
    lease = {"VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "4"}
    pair = start_pair(tiny_llama, environment={**RACES, **lease})
    pair.complete(prompt_of(300), NUM_TOKENS)
    assert becomes_true(lambda: usage(pair) == 0, 3)
    pair.prefill(prompt_of(300, seed=1))
    assert usage(pair) > 0
    assert becomes_true(lambda: usage(pair) == 0, 20)
    pair.close()


def usage(pair: MooncakePair) -> float:
    """The share of the engine of prefills' blocks that requests hold."""
    return metric(pair.prefills, "vllm:kv_cache_usage_perc")
