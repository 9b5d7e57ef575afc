"""MiniMax-M3's attention to chosen blocks: transformers' tokens on every path of a step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from vllm_davinci_testing.engines.compressed_zoo import in_transformers
from vllm_davinci_testing.engines.fixture_types import StartEngine
from vllm_davinci_testing.engines.generating import (
    EVERY_PATH,
    FUZZED,
    IN_PARTS,
    RACES,
    assert_generates,
    assert_same_on_every_path,
    greedy_tokens,
    random_prompts,
)
from vllm_davinci_testing.engines.integer_reference import IntegerReference
from vllm_davinci_testing.engines.minimax_checkpoint import BLOCK_SIZE, NUM_CHOSEN, write_minimax
from vllm_davinci_testing.engines.preemption import COUNTED, assert_no_layer_waits, few_blocks
from vllm_davinci_testing.engines.transformers_reference import TransformersReference

MAX_TOKENS = 12
OF_TEXT = {"max_model_len": 640, "limit_mm_per_prompt": {"image": 0, "video": 0}}
# Prompt lengths around the edges of a block and of the number of chosen blocks; 16 generated tokens
# cross the next edges.
LENGTHS = [
    *(1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1),
    *(BLOCK_SIZE * NUM_CHOSEN - 5, BLOCK_SIZE * NUM_CHOSEN + 1, BLOCK_SIZE * 3 + 65),
    BLOCK_SIZE * 4 - 3,
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_minimax(tmp_path_factory.mktemp("minimax_m3"))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> TransformersReference:
    return TransformersReference(checkpoint)


@pytest.mark.parametrize("options", EVERY_PATH)
def test_tokens_equal_those_of_transformers_in_any_order_that_events_allow(
    options: dict[str, Any],
    checkpoint: Path,
    expected: TransformersReference,
    start_engine: StartEngine,
):
    with start_engine(checkpoint, environment=FUZZED, **OF_TEXT, **options) as engine:
        assert_same_on_every_path(engine, expected, LENGTHS, MAX_TOKENS, options)


@pytest.mark.thorough
def test_preempted_and_cached_prompts_give_the_same_tokens_and_no_layer_waits(
    checkpoint: Path, expected: TransformersReference, start_engine: StartEngine
):
    common = random_prompts([BLOCK_SIZE * 3], seed=1)[0]
    sharing = [[*common, *more] for more in random_prompts([1, 30, 7], seed=2)]
    with start_engine(
        checkpoint,
        environment=RACES,
        **COUNTED,
        max_num_batched_tokens=64,
        max_num_seqs=16,
        **few_blocks(10),
        **OF_TEXT,
    ) as engine:
        crowd = random_prompts([BLOCK_SIZE - 5] * 8, seed=3)
        assert_no_layer_waits(engine, expected, crowd, MAX_TOKENS)
        hits = engine.metrics()["vllm:prefix_cache_hits"]
        for each in sharing:
            assert_generates(engine, expected, [each], MAX_TOKENS)
        hits = engine.metrics()["vllm:prefix_cache_hits"] - hits
    assert hits >= BLOCK_SIZE * 3 * (len(sharing) - 1)


@pytest.mark.thorough
def test_an_int8_export_gives_the_tokens_of_its_integers(
    checkpoint: Path,
    expected: TransformersReference,
    quantize: Callable[..., Path],
    start_engine: StartEngine,
):
    directory = quantize(checkpoint, "W8A8_DYNAMIC")
    prompts = random_prompts(LENGTHS)
    asked = {"dtype": "bfloat16", **IN_PARTS, **OF_TEXT}
    with start_engine(directory, environment=RACES, **asked) as engine:
        tokens = greedy_tokens(engine, prompts, MAX_TOKENS)
    auto_class = transformers.AutoModelForImageTextToText
    named = partial(in_transformers, model_type="minimax_m3_vl")
    integers = IntegerReference(directory, auto_class, named=named)
    rounded = TransformersReference(checkpoint, torch.bfloat16)
    ours = sum(integers.differing_tokens(prompts, tokens))
    in_16_bits = [rounded.greedy(each, MAX_TOKENS) for each in prompts]
    allowed = sum(expected.differing_tokens(prompts, in_16_bits))
    of_floats = sum(expected.differing_tokens(prompts, tokens))
    print(f"differing tokens: {ours}, in 16 bits {allowed}, from floats {of_floats}")
    assert ours <= 1.5 * allowed
    assert ours < of_floats
