"""Prefills in one engine, decodes in another: the tokens of one engine, whatever happens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from vllm import SamplingParams

from vllm_davinci.core.export.exporter import Exporter
from vllm_davinci_testing.engines.disaggregated import Answer, Pair, metric
from vllm_davinci_testing.engines.engine_process import EngineProcess, chip_for
from vllm_davinci_testing.engines.server_process import SMALL, ForkedServer
from vllm_davinci_testing.processes.waiting import becomes_true

pytest.importorskip("nixl", reason="disaggregation needs nixl: pip install 'vllm-davinci[pd]'")

NUM_TOKENS = 6
BLOCK_TOKENS = 128
LEASE_S, TRANSFER_LIMIT_S = 4, 2
# Prompts are computed in pieces of 200 tokens, which end within blocks.
OPTIONS = (*SMALL, "--max-num-batched-tokens=200", "--max-model-len=768")
# Few blocks: what a prompt leaves behind is soon another prompt's.
FEW_BLOCKS = "--num-gpu-blocks-override=13"
RACES = {"VNPU_RACES": "raise", "VNPU_SCHEDULE": "fuzz:3"}
TRANSFERS = "vllm:nixl_bytes_transferred_count"


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [3 + (i * 7 + length + 31 * seed) % 97 for i in range(length)]


def usage(server: ForkedServer) -> float:
    """The share of blocks that requests hold."""
    return metric(server, "vllm:kv_cache_usage_perc")


@pytest.fixture(scope="module")
def start_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Pair]]:
    """Starts pairs of engines; they end with the module."""
    started: list[Pair] = []

    def start(model: Path, *options: str, **settings: Any) -> Pair:
        settings = {"environment": RACES, **settings}
        pair = Pair(model, tmp_path_factory.mktemp("pair"), *OPTIONS, *options, **settings)
        started.append(pair)
        return pair.wait_until_ready()

    yield start
    for pair in started:
        pair.close()


@pytest.fixture(scope="module")
def alone(start_engine: Callable[..., EngineProcess]) -> Callable[..., Answer]:
    """Answers of one engine that does both."""
    engines: dict[str, EngineProcess] = {}
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)

    def answer(model: Path, prompt: list[int], **options: Any) -> Answer:
        key = f"{model} {options}"
        if key not in engines:
            options = {"max_model_len": 768, "max_num_batched_tokens": 200, **options}
            engines[key] = start_engine(model, **options)
        (output,) = engines[key].generate([{"prompt_token_ids": prompt}], sampling)
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        places = zip(tokens, completion.logprobs, strict=True)
        return Answer(tokens, [entries[token].logprob for token, entries in places])

    return answer


@pytest.fixture(scope="module")
def pair(tiny_llama: Path, start_pair: Callable[..., Pair]) -> Pair:
    return start_pair(
        tiny_llama,
        of_prefills=(FEW_BLOCKS,),
        extra={"kv_lease_duration": LEASE_S, "transfer_timeout": TRANSFER_LIMIT_S},
    )


def assert_bits_of_one_engine(pair: Pair, alone: Callable[[list[int]], Answer]) -> None:
    """Tokens and logprobs of prompts of whole blocks and a token. One engine, when it is asked for
    them again, has the blocks and computes that token alone, as an engine of decodes does."""
    for blocks in (1, 2):
        prompt = prompt_of(blocks * BLOCK_TOKENS + 1, seed=50 + blocks)
        alone(prompt)
        assert pair.complete(prompt, NUM_TOKENS) == alone(prompt)


# Less than a block, a whole one, and pieces of a prompt that end within blocks.
LENGTHS = (5, 128, 389)


def test_two_engines_give_the_tokens_of_one(
    pair: Pair, tiny_llama: Path, alone: Callable[..., Answer]
):
    prompts = [prompt_of(length) for length in LENGTHS]
    before = metric(pair.decodes, TRANSFERS)
    for prompt in prompts:
        assert pair.complete(prompt, NUM_TOKENS).tokens == alone(tiny_llama, prompt).tokens
    assert_bits_of_one_engine(pair, lambda prompt: alone(tiny_llama, prompt))
    # Each came over, and its blocks are free again.
    assert metric(pair.decodes, TRANSFERS) - before == len(prompts) + 2
    assert becomes_true(lambda: usage(pair.prefills) == 0, 5)


def test_several_requests_at_once(pair: Pair, tiny_llama: Path, alone: Callable[..., Answer]):
    # The second half begins with blocks that the first has left in both engines' prefix caches.
    prompts = [prompt_of(140 + n, seed=n % 2) for n in range(4)]
    prompts += [[*prompt[:BLOCK_TOKENS], *prompt_of(90, seed=9)] for prompt in prompts]
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda prompt: pair.complete(prompt, NUM_TOKENS), prompts))
    expected = [alone(tiny_llama, prompt).tokens for prompt in prompts]
    assert [answer.tokens for answer in answers] == expected


def test_blocks_that_were_given_away_are_not_taken_for_the_prompts(
    pair: Pair, tiny_llama: Path, alone: Callable[..., Answer]
):
    prompt = prompt_of(330, seed=20)
    told = pair.prefill(prompt)
    assert becomes_true(lambda: usage(pair.prefills) == 0, LEASE_S + 10), "the lease goes on"
    for seed in (21, 22):  # these take all blocks
        pair.prefill(prompt_of(750, seed))
    assert pair.decode(prompt, told, NUM_TOKENS).tokens == alone(tiny_llama, prompt).tokens
    assert "unsealed" in pair.decodes.log_text()


def test_a_request_that_is_given_up_leaves_its_blocks(
    pair: Pair, tiny_llama: Path, alone: Callable[..., Answer]
):
    prompt = prompt_of(310, seed=30)
    told = pair.prefill(prompt)
    asked = {"model": str(tiny_llama), "prompt": prompt, "max_tokens": 400}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{pair.decodes.url}/v1/completions",
            json={**asked, "ignore_eos": True, "kv_transfer_params": told},
            timeout=0.5,
        )
    assert becomes_true(lambda: usage(pair.prefills) == usage(pair.decodes) == 0, LEASE_S + 10)
    assert pair.complete(prompt, NUM_TOKENS).tokens == alone(tiny_llama, prompt).tokens


def test_what_does_not_come_is_computed_again(
    pair: Pair, tiny_llama: Path, alone: Callable[..., Answer]
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
    finally:
        pair.continue_prefills()
    assert pair.complete(prompts[1], NUM_TOKENS).tokens == expected[1]

    told = pair.prefill(prompts[2])
    pair.prefills.kill()
    assert pair.decode(prompts[2], told, NUM_TOKENS).tokens == expected[2]
    pair.restart_prefills()
    before = metric(pair.decodes, TRANSFERS)
    assert pair.complete(prompts[3], NUM_TOKENS).tokens == expected[3]
    assert metric(pair.decodes, TRANSFERS) == before + 1, pair.decodes.tail()


THOROUGH = pytest.mark.thorough


@pytest.fixture(scope="module")
def models(
    tiny_llama: Path, tiny_deepseek: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """The directory of a checkpoint, of the repository or with int8 layers."""

    def find(name: str) -> Path:
        if name != "w8a8_llama":
            return {"tiny_llama": tiny_llama, "tiny_deepseek": tiny_deepseek}[name]
        directory = tmp_path_factory.mktemp("int8") / name
        kind = "W8A8_DYNAMIC"
        Exporter(tiny_llama, directory, kind, torch.bfloat16, None).run(lambda _: None)
        return directory

    return find


WHOLE_PROMPTS = (
    "--max-num-batched-tokens=768",
    '--additional-config={"ascend_scheduler_config": {"enabled": true}}',
)
BF16 = {"dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("name", "ranks", "options", "of_one"),
    [
        pytest.param("tiny_deepseek", 1, (), {}, marks=THOROUGH, id="mla"),
        pytest.param("tiny_llama", 2, (), {}, marks=THOROUGH, id="two_ranks"),
        pytest.param("tiny_deepseek", 2, (), {}, marks=THOROUGH, id="mla_two_ranks"),
        pytest.param("w8a8_llama", 1, ("--dtype=bfloat16",), BF16, marks=THOROUGH, id="w8a8"),
        pytest.param("tiny_llama", 1, ("--no-enforce-eager",), {}, marks=THOROUGH, id="graphs"),
        pytest.param(
            "tiny_llama",
            1,
            WHOLE_PROMPTS,
            {"max_num_batched_tokens": 768},
            marks=THOROUGH,
            id="prefill_first",
        ),
    ],
)
def test_every_kind_of_engine_gives_the_bits_of_one(
    name: str,
    ranks: int,
    options: tuple[str, ...],
    of_one: dict[str, Any],
    models: Callable[[str], Path],
    start_pair: Callable[..., Pair],
    alone: Callable[..., Answer],
):
    model = models(name)
    environment = {**RACES, **chip_for(of_one.get("dtype", "float32"))}
    pair = start_pair(model, f"-tp={ranks}", *options, environment=environment)
    of_one = {"tensor_parallel_size": ranks, **of_one}
    assert_bits_of_one_engine(pair, lambda prompt: alone(model, prompt, **of_one))
    assert metric(pair.decodes, TRANSFERS) == 2 * ranks
    pair.close()


@THOROUGH
def test_a_request_whose_blocks_do_not_come_ends_with_an_error_where_that_is_asked_for(
    tiny_llama: Path, start_pair: Callable[..., Pair], alone: Callable[..., Answer]
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
    tiny_llama: Path, start_pair: Callable[..., Pair], alone: Callable[..., Answer]
):
    pair = start_pair(tiny_llama, of_prefills=("-tp=2",))
    prompt = prompt_of(200)
    assert pair.complete(prompt, NUM_TOKENS).tokens == alone(tiny_llama, prompt).tokens
    assert "has --tensor-parallel-size 2, and this one 1" in pair.decodes.log_text()
    pair.close()


@THOROUGH
def test_two_engines_of_each_kind_serve_each_other(
    tiny_llama: Path, start_pair: Callable[..., Pair], alone: Callable[..., Answer]
):
    pairs = [start_pair(tiny_llama) for _ in range(2)]
    for number, (one, other) in enumerate(product(pairs, pairs)):
        prompt = prompt_of(260, seed=60 + number)
        answer = other.decode(prompt, one.prefill(prompt), NUM_TOKENS)
        assert answer.tokens == alone(tiny_llama, prompt).tokens
    for pair in pairs:
        assert metric(pair.decodes, TRANSFERS) == 2
        pair.close()
