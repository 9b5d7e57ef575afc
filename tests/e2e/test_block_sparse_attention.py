"""MiniMax-M3's block-sparse attention: transformers' tokens on every path of a step."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from vllm import SamplingParams

from vllm_davinci.core.checkpoint.check import check_checkpoint
from vllm_davinci_testing.engines.compressed_zoo import in_transformers
from vllm_davinci_testing.engines.eagle_checkpoint import fit_eagle3, random_eagle3
from vllm_davinci_testing.engines.fixture_types import StartEngine
from vllm_davinci_testing.engines.generating import (
    EVERY_PATH,
    FUZZED,
    IN_PARTS,
    RACES,
    TWO_RANKS,
    as_inputs,
    assert_generates,
    assert_same_on_every_path,
    greedy_tokens,
    random_prompts,
)
from vllm_davinci_testing.engines.integer_reference import IntegerReference
from vllm_davinci_testing.engines.minimax_checkpoint import BLOCK_SIZE, NUM_CHOSEN, write_minimax
from vllm_davinci_testing.engines.preemption import COUNTED, assert_no_layer_waits, few_blocks
from vllm_davinci_testing.engines.speculating import speculation, told
from vllm_davinci_testing.engines.transformers_reference import TransformersReference

A2 = "Ascend910B3"
MAX_TOKENS = 12
NUM_DRAFTS = 3
SYNCHRONOUS = {"async_scheduling": False, "enforce_eager": True}
COUNTS_GRAPHS = {"worker_extension_cls": "vllm_davinci_testing.engines.graph_worker.GraphWorker"}
OF_TEXT = {"max_model_len": 640, "limit_mm_per_prompt": {"image": 0, "video": 0}}
# Prompt lengths around the size of a block and of NUM_CHOSEN blocks; generated tokens cross the
# next edges.
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
    options, checkpoint, expected, start_engine
):
    with start_engine(
        checkpoint, environment=FUZZED, **COUNTS_GRAPHS, **OF_TEXT, **options
    ) as engine:
        # First steps that need no choice of blocks, then steps that choose: each kind has its own
        # graphs.
        assert_generates(engine, expected, random_prompts(LENGTHS[:5]), MAX_TOKENS)
        assert_same_on_every_path(engine, expected, LENGTHS, MAX_TOKENS, options)
        if "enforce_eager" in options:
            for planned, held in engine.on_workers("planned_and_held"):
                assert held["graphs"] == 2 * planned["graphs"]
                assert held["updatable_tasks"] == planned["updatable_tasks"]
                assert held["streams"] <= planned["streams"]


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
    checkpoint, expected, quantize, start_engine
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


@pytest.fixture(scope="module")
def head(checkpoint, expected, tmp_path_factory) -> Path:
    """Returns an EAGLE-3 head that drafts what follows the prompts of LENGTHS."""
    vocabulary, layers = expected.network.config.text_config.vocab_size, (0, 1, 2)
    directory = tmp_path_factory.mktemp("eagle3") / "head"
    random_eagle3(checkpoint, directory, vocabulary - 1, layers)  # all would need no `d2t`
    prompts = random_prompts(LENGTHS)
    texts = [(each, expected.greedy(each, MAX_TOKENS + NUM_DRAFTS)) for each in prompts]
    fit_eagle3(directory, layers, expected, texts, NUM_DRAFTS)
    return directory


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options", [{}, SYNCHRONOUS, {**TWO_RANKS, **IN_PARTS}], ids=["graphs", "sync", "tensor2"]
)
def test_eagle3_heads_change_no_token_and_draft_what_they_know(
    options, checkpoint, expected, head, start_engine
):
    asked = {
        "enforce_eager": False,
        **speculation("eagle3", NUM_DRAFTS, model=str(head)),
        **options,
    }
    with start_engine(checkpoint, environment=FUZZED, **OF_TEXT, **asked) as engine:
        unknown = random_prompts(LENGTHS, seed=5)
        for prompts in (unknown[:5], unknown):
            assert_generates(engine, expected, prompts, MAX_TOKENS)
        before = told(engine)
        assert before[0] - before[1] > MAX_TOKENS * len(LENGTHS)
        assert_generates(engine, expected, random_prompts(LENGTHS), MAX_TOKENS)
        drafted, accepted = (new - old for new, old in zip(told(engine), before, strict=True))
        print(f"{accepted} of {drafted} drafts of known texts accepted")
        assert accepted > 0.95 * drafted > MAX_TOKENS * len(LENGTHS) / 2
        if options is not SYNCHRONOUS:
            assert all(sum(each.values()) for each in engine.on_workers("graph_replays"))


@pytest.mark.thorough
def test_logprobs_in_16_bits_are_as_close_to_floats_as_those_of_transformers(
    checkpoint: Path, expected: TransformersReference, start_engine: StartEngine
):
    prompts = random_prompts(LENGTHS[1:])
    asked = {"dtype": "bfloat16", **IN_PARTS, **OF_TEXT}
    scored = SamplingParams(max_tokens=1, prompt_logprobs=0)
    with start_engine(checkpoint, environment={**RACES, "VNPU_SOC": A2}, **asked) as engine:
        outputs = engine.generate(as_inputs(prompts), scored)
    ours = [
        row[token].logprob
        for prompt, output in zip(prompts, outputs, strict=True)
        for token, row in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
    ]
    exact, rounded = (
        torch.cat([_of_tokens(each.logprobs(prompt), prompt) for prompt in prompts])
        for each in (expected, TransformersReference(checkpoint, torch.bfloat16))
    )
    error, allowed = (float((each - exact).abs().mean()) for each in (torch.tensor(ours), rounded))
    print(f"mean error of a logprob: {error:.4f}, of transformers in 16 bits: {allowed:.4f}")
    assert error <= 1.15 * allowed


def _of_tokens(logprobs: torch.Tensor, prompt: list[int]) -> torch.Tensor:
    return logprobs[:-1].gather(1, torch.tensor([prompt[1:]]).t()).flatten()


def test_the_files_are_complete(checkpoint: Path):
    report = check_checkpoint(checkpoint)
    assert report.can_load, report.problems()


@pytest.mark.thorough
def test_offloaded_blocks_come_back(checkpoint, expected, start_engine):
    prompts = random_prompts([BLOCK_SIZE * 4 - 3] * 4, seed=4)
    with start_engine(
        checkpoint,
        environment=FUZZED,
        kv_offloading_size=0.25,
        max_num_seqs=2,
        **few_blocks(12),
        **OF_TEXT,
    ) as engine:
        for _ in range(2):
            assert_generates(engine, expected, prompts, MAX_TOKENS)
        assert engine.metrics()["vllm:external_prefix_cache_hits"] >= BLOCK_SIZE * 3
