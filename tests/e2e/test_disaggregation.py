"""Prefill in one engine, decode in another: one engine's tokens, whatever fails."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path

import httpx
import pytest
import torch

from vllm_davinci.core.export.exporter import Exporter
from vllm_davinci_testing.engines.disaggregated import Answer, Pair, metric
from vllm_davinci_testing.engines.disaggregated_checks import (
    FAILURES,
    LENGTHS,
    NUM_TOKENS,
    SHORT,
    assert_bits_of_one_engine,
    assert_computed_again,
    assert_shares_blocks,
    pair_with_bits_of_one_engine,
    pairs_of,
    prompt_of,
    prompts_that_share_blocks,
)
from vllm_davinci_testing.engines.fixture_types import Zoo
from vllm_davinci_testing.engines.minimax_checkpoint import write_minimax
from vllm_davinci_testing.engines.server_process import ForkedServer
from vllm_davinci_testing.processes.waiting import becomes_true

pytest.importorskip("nixl", reason="disaggregation needs nixl: pip install 'vllm-davinci[pd]'")

LEASE_S, TRANSFER_LIMIT_S = 4, 2
# With few blocks, a prompt's blocks are reused soon.
FEW_BLOCKS = "--num-gpu-blocks-override=13"
TRANSFERS = "vllm:nixl_bytes_transferred_count"


def usage(server: ForkedServer) -> float:
    """Returns the share of KV cache blocks that requests hold."""
    return metric(server, "vllm:kv_cache_usage_perc")


@pytest.fixture(scope="module")
def start_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Pair]]:
    with pairs_of(Pair, tmp_path_factory.mktemp) as start:
        yield start


@pytest.fixture(scope="module")
def pair(tiny_llama: Path, start_pair: Callable[..., Pair]) -> Pair:
    return start_pair(
        tiny_llama,
        of_prefills=(FEW_BLOCKS,),
        extra={"kv_lease_duration": LEASE_S, "transfer_timeout": TRANSFER_LIMIT_S},
    )


def test_two_engines_give_the_tokens_of_one(pair, tiny_llama, alone):
    prompts = [prompt_of(length) for length in LENGTHS]
    before = metric(pair.decodes, TRANSFERS)
    for prompt in prompts:
        assert pair.complete(prompt, NUM_TOKENS).tokens == alone(tiny_llama, prompt).tokens
    assert_bits_of_one_engine(pair, partial(alone, tiny_llama))
    # Each prompt was transferred, and its blocks are free again.
    assert metric(pair.decodes, TRANSFERS) - before == len(prompts) + 2
    assert becomes_true(lambda: usage(pair.prefills) == 0, 5)


def test_several_requests_at_once(pair: Pair, tiny_llama: Path, alone: Callable[..., Answer]):
    prompts = prompts_that_share_blocks()
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda prompt: pair.complete(prompt, NUM_TOKENS), prompts))
    expected = [alone(tiny_llama, prompt).tokens for prompt in prompts]
    assert [answer.tokens for answer in answers] == expected


@pytest.mark.nightly("hosts")
def test_blocks_that_were_given_away_are_not_taken_for_the_prompts(pair, tiny_llama, alone):
    prompt = prompt_of(330, seed=20)
    told = pair.prefill(prompt)
    assert becomes_true(lambda: usage(pair.prefills) == 0, LEASE_S + 10), "the lease goes on"
    for seed in (21, 22):  # these prompts take all blocks
        pair.prefill(prompt_of(750, seed))
    assert pair.decode(prompt, told, NUM_TOKENS).tokens == alone(tiny_llama, prompt).tokens
    assert "checksum mismatch" in pair.decodes.log_text()


@pytest.mark.nightly("hosts")
def test_a_request_that_is_given_up_leaves_its_blocks(pair, tiny_llama, alone):
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


@pytest.mark.nightly("hosts")
def test_blocks_that_do_not_arrive_are_recomputed(pair, tiny_llama, alone):
    def come() -> float:
        return metric(pair.decodes, TRANSFERS)

    of_one = partial(alone, tiny_llama)
    assert_computed_again(pair, of_one, come, lambda prompt: 1, TRANSFER_LIMIT_S)


THOROUGH = pytest.mark.thorough


@pytest.fixture(scope="module")
def models(
    tiny_llama: Path, tiny_deepseek: Path, zoo: Zoo, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Returns the directory of a shipped checkpoint, of its int8 export, or of a small model."""

    def find(name: str) -> Path:
        if name == "minimax_m3":
            return write_minimax(tmp_path_factory.mktemp(name))
        if name != "w8a8_llama":
            shipped = {"tiny_llama": tiny_llama, "tiny_deepseek": tiny_deepseek}
            return shipped.get(name) or zoo(name)
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
KEYS = {"indexer_kv_dtype": "int8"}
INT8_KEYS = (
    (*SHORT[0], f"--attention-config={json.dumps(KEYS)}"),
    {**SHORT[1], "attention_config": KEYS},
)
OF_TEXT = ("--language-model-only",), {"language_model_only": True}


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
        pytest.param("deepseek_v4", 1, *SHORT, marks=THOROUGH, id="compressed"),
        pytest.param("deepseek_v4", 2, *SHORT, marks=THOROUGH, id="compressed_two_ranks"),
        pytest.param("deepseek_v4", 1, *INT8_KEYS, marks=THOROUGH, id="compressed_int8_keys"),
        pytest.param("deepseek_v32", 1, *SHORT, marks=THOROUGH, id="sparse_mla"),
        pytest.param("hy_v4", 1, *SHORT, marks=THOROUGH, id="sinks"),
        pytest.param("minimax_m3", 1, *OF_TEXT, marks=THOROUGH, id="chosen_blocks"),
        pytest.param("minimax_m3", 2, *OF_TEXT, marks=THOROUGH, id="chosen_blocks_two_ranks"),
    ],
)
def test_every_kind_of_engine_gives_the_bits_of_one(
    name, ranks, options, of_one, models, start_pair, alone
):
    model = models(name)
    pair = pair_with_bits_of_one_engine(
        *(start_pair, alone, model), *options, ranks=ranks, **of_one
    )
    assert metric(pair.decodes, TRANSFERS) == 2 * ranks
    if name == "deepseek_v4":
        assert_shares_blocks(pair, partial(alone, model, tensor_parallel_size=ranks, **of_one))
    pair.close()


@THOROUGH
@pytest.mark.parametrize(("settings", "assert_fails"), FAILURES)
def test_pairs_that_cannot_transfer_say_so(settings, assert_fails, tiny_llama, start_pair, alone):
    assert_fails(start_pair(tiny_llama, **settings), partial(alone, tiny_llama))


@THOROUGH
def test_two_engines_of_each_kind_serve_each_other(tiny_llama, start_pair, alone):
    pairs = [start_pair(tiny_llama) for _ in range(2)]
    for number, (one, other) in enumerate(product(pairs, pairs)):
        prompt = prompt_of(260, seed=60 + number)
        answer = other.decode(prompt, one.prefill(prompt), NUM_TOKENS)
        assert answer.tokens == alone(tiny_llama, prompt).tokens
    for pair in pairs:
        assert metric(pair.decodes, TRANSFERS) == 2
        pair.close()
