"""Mooncake transfers blocks: one engine's tokens, whatever happens to a transfer."""

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from vllm_davinci_testing.engines.disaggregated import Answer, MooncakePair, metric
from vllm_davinci_testing.engines.disaggregated_checks import (
    FAILURES,
    LENGTHS,
    NUM_TOKENS,
    RACES,
    SHORT,
    WHOLE_BLOCKS_AND_ONE,
    assert_bits_of_one_engine,
    assert_computed_again,
    assert_shares_blocks,
    pair_with_bits_of_one_engine,
    pairs_of,
    prompt_of,
    prompts_that_share_blocks,
)
from vllm_davinci_testing.processes.waiting import becomes_true

pytestmark = pytest.mark.nightly("hosts")

pytest.importorskip(
    "mooncake.engine",
    reason="Mooncake: pip install 'vllm-davinci[mooncake]', and libibverbs1 of the system",
    exc_type=ImportError,
)

THOROUGH = pytest.mark.thorough
TRANSFER_LIMIT_S = 2
FAILED = re.compile("pulling kv_caches for .* failed|checksum mismatch")


@pytest.fixture(scope="module")
def start_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., MooncakePair]]:
    with pairs_of(MooncakePair, tmp_path_factory.mktemp) as start:
        yield start


@pytest.fixture(scope="module")
def pair(tiny_llama: Path, start_pair: Callable[..., MooncakePair]) -> MooncakePair:
    return start_pair(tiny_llama, extra={"transfer_timeout": TRANSFER_LIMIT_S})


def test_two_engines_give_the_tokens_of_one(pair, tiny_llama, alone):
    prompts = [prompt_of(length) for length in LENGTHS]
    before = came(pair)
    for prompt in prompts:
        assert pair.complete(prompt, NUM_TOKENS).tokens == alone(tiny_llama, prompt).tokens
    assert_bits_of_one_engine(pair, partial(alone, tiny_llama))
    assert came(pair) - before == sum(LENGTHS) + sum(WHOLE_BLOCKS_AND_ONE)
    assert not FAILED.search(pair.decodes.log_text())


def came(pair: MooncakePair) -> float:
    """Returns the number of tokens whose keys and values were transferred."""
    return metric(pair.decodes, "vllm:external_prefix_cache_hits_total")


@THOROUGH
def test_both_engines_are_asked_at_once_for_several_requests(pair, tiny_llama, alone):
    prompts = prompts_that_share_blocks()

    def complete(prompt: list[int]) -> Answer:
        told = pair.transfer()
        with ThreadPoolExecutor(1) as prefills:
            prefills.submit(pair.begin_prefill, prompt, told)
            return pair.decode(prompt, told, NUM_TOKENS)

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(complete, prompts))
    assert [each.tokens for each in answers] == [alone(tiny_llama, p).tokens for p in prompts]


def test_blocks_of_another_prompt_are_not_taken_for_the_requests(pair, tiny_llama, alone):
    """The proxy swaps the transfers of two prompts of equal length."""
    prompt = prompt_of(330, seed=20)
    told = pair.prefill(prompt_of(330, seed=21))
    assert pair.decode(prompt, told, NUM_TOKENS).tokens == alone(tiny_llama, prompt).tokens
    assert "checksum mismatch" in pair.decodes.log_text()


def test_blocks_that_do_not_arrive_are_recomputed(pair, tiny_llama, alone):
    of_one = partial(alone, tiny_llama)
    assert_computed_again(pair, of_one, lambda: came(pair), len, TRANSFER_LIMIT_S)
    assert f"timed out after {TRANSFER_LIMIT_S} s" in pair.decodes.log_text()


@THOROUGH
def test_a_worker_that_ends_while_it_is_waited_for_is_noticed_at_once(
    tiny_llama: Path, start_pair: Callable[..., MooncakePair], alone: Callable[..., Answer]
):
    pair = start_pair(tiny_llama)  # waits as long as vLLM's limit, for minutes
    prompt = prompt_of(300, seed=70)
    pair.complete(prompt_of(20), NUM_TOKENS)  # connects the engines
    with ThreadPoolExecutor(1) as decodes:
        answer = decodes.submit(pair.decode, prompt, pair.transfer(), NUM_TOKENS)
        time.sleep(2)
        assert not answer.done()  # the prefill has not begun
        pair.prefills.kill()
        assert answer.result(30).tokens == alone(tiny_llama, prompt).tokens
    assert "the prefill engine has ended" in pair.decodes.log_text()
    pair.close()


@THOROUGH
@pytest.mark.parametrize(("settings", "assert_fails"), FAILURES)
def test_pairs_that_cannot_transfer_say_so(settings, assert_fails, tiny_llama, start_pair, alone):
    assert_fails(start_pair(tiny_llama, **settings), partial(alone, tiny_llama))


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
        pytest.param("deepseek_v4", 1, *SHORT, id="compressed"),
    ],
)
def test_bits_equal_those_of_one_engine(
    name, ranks, options, of_one, request, zoo, start_pair, alone
):
    model: Path = zoo(name) if name == "deepseek_v4" else request.getfixturevalue(name)
    pair = pair_with_bits_of_one_engine(
        *(start_pair, alone, model), *options, ranks=ranks, **of_one
    )
    assert came(pair) == sum(WHOLE_BLOCKS_AND_ONE)
    if name == "deepseek_v4":
        assert_shares_blocks(pair, partial(alone, model, **of_one))
    pair.close()


@THOROUGH
def test_blocks_are_freed_after_their_transfer_or_its_time_limit(tiny_llama, start_pair):
    lease = {"VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "4"}
    pair = start_pair(tiny_llama, environment={**RACES, **lease})
    pair.complete(prompt_of(300), NUM_TOKENS)
    assert becomes_true(lambda: usage(pair) == 0, 3)
    pair.prefill(prompt_of(300, seed=1))
    assert usage(pair) > 0
    assert becomes_true(lambda: usage(pair) == 0, 20)
    pair.close()


def usage(pair: MooncakePair) -> float:
    """Returns the share of the prefill engine's blocks that requests hold."""
    return metric(pair.prefills, "vllm:kv_cache_usage_perc")
