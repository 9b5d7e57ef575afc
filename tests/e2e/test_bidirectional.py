"""Bidirectional attention in prompts: Gemma3's images, PaliGemma, HRM-Text; refusals."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from vllm_davinci_testing.engines import pictures
from vllm_davinci_testing.engines.engine_process import EngineError
from vllm_davinci_testing.engines.family_zoo import write_family
from vllm_davinci_testing.engines.fixture_types import StartEngine
from vllm_davinci_testing.engines.gemma3_checkpoint import (
    TOKENS_PER_IMAGE,
    gemma3_prompt,
    write_gemma3,
)
from vllm_davinci_testing.engines.generating import (
    COMPOSED,
    FUZZED,
    TWO_RANKS,
    assert_generates,
    random_prompts,
)
from vllm_davinci_testing.engines.graph_settings import decode_graphs
from vllm_davinci_testing.engines.multimodal_reference import MultimodalReference
from vllm_davinci_testing.engines.paligemma_checkpoint import write_paligemma
from vllm_davinci_testing.engines.refusals import refusal_of
from vllm_davinci_testing.engines.rounding import first_wrong_token
from vllm_davinci_testing.engines.speculating import speculation
from vllm_davinci_testing.engines.transformers_reference import TransformersReference

MAX_TOKENS = 12
THOROUGH = pytest.mark.thorough
# Gemma3 prompts: an image between each pair of strings.
GEMMA3_WORDS = [
    ("look: ", " what is this"),
    ("", "", " and these"),
    ("one", "two", "three", "", "five"),
    ("no image at all",),
    ("a text of more than one window before it" * 4, ""),
]
# PaliGemma: an image, then text; the last prompt has no image and is causal.
PALIGEMMA_WORDS = ["", "what is this", "more text than a block has " * 6, "and this", "no image"]
CHUNKS = {"max_num_batched_tokens": 3 * TOKENS_PER_IMAGE, "max_num_seqs": 4}
GRAPHS = decode_graphs(2, 8)
LIMITS: dict[str, dict[str, Any]] = {
    "gemma3": {"max_model_len": 512, "limit_mm_per_prompt": {"image": 4}},
    "paligemma": {"max_model_len": 256, "max_num_batched_tokens": 256},
}
# vLLM settings that each model changes.
CHANGED = {
    "gemma3": ("disable_chunked_mm_input", "enable_prefix_caching"),
    "paligemma": ("disable_chunked_mm_input", "enable_prefix_caching", "enable_chunked_prefill"),
}
WHY = {
    "gemma3": "tokens of an image attend bidirectionally",
    "paligemma": "a prompt with an image attends bidirectionally",
}


def greedy(max_tokens: int = MAX_TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def requests(family: str) -> list[dict[str, Any]]:
    every: list[dict[str, Any]] = []
    if family == "paligemma":
        for number, words in enumerate(PALIGEMMA_WORDS):
            image = pictures.image(40 + 20 * number, 90, seed=number)
            data = {} if words == "no image" else {"multi_modal_data": {"image": [image]}}
            every.append({"prompt": words, **data})
        return every
    for number, between in enumerate(GEMMA3_WORDS):
        images = [
            pictures.image(40 + 20 * i, 90, seed=10 * number + i) for i in range(len(between) - 1)
        ]
        data = {"multi_modal_data": {"image": images}} if images else {}
        every.append({"prompt": gemma3_prompt(*between), **data})
    return every


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    directory = tmp_path_factory.mktemp("both_ways")
    write = {"gemma3": write_gemma3, "paligemma": write_paligemma}
    return cache(lambda family: write[family](directory / family))


@pytest.fixture(scope="module")
def reference(checkpoint: Callable[[str], Path]) -> Callable[[str], MultimodalReference]:
    return cache(lambda family: MultimodalReference(checkpoint(family)))


def assert_chosen(
    reference: MultimodalReference, asked: list[dict[str, Any]], outputs: list[Any]
) -> None:
    for request, output in zip(asked, outputs, strict=True):
        prompt, tokens = output.prompt_token_ids, list(output.outputs[0].token_ids)
        assert len(tokens) >= MAX_TOKENS
        wrong = first_wrong_token(
            reference.network,
            lambda r=request, p=prompt, t=tokens: reference.logits(r, p, t),
            tokens,
        )
        assert wrong is None, f"{request['prompt']!r}: {wrong}"


@pytest.mark.parametrize("family", ["gemma3", pytest.param("paligemma", marks=THOROUGH)])
@pytest.mark.parametrize(
    ("options", "environment"),
    [
        # Chunks of Gemma3's prompts end before or after an image, never inside.
        pytest.param(GRAPHS, FUZZED, id="graphs_races"),
        pytest.param({}, {}, id="whole", marks=THOROUGH),
        pytest.param(TWO_RANKS, {}, id="tensor2", marks=THOROUGH),
        pytest.param(COMPOSED, {}, id="composed", marks=THOROUGH),
    ],
)
def test_tokens_equal_those_of_transformers(
    options, environment, family, checkpoint, reference, start_engine
):
    asked = requests(family)
    options = {**LIMITS[family], **options}
    if family == "gemma3" and environment:
        options |= CHUNKS
    with start_engine(checkpoint(family), environment=environment, **options) as engine:
        outputs = engine.generate(asked, greedy())
        again = engine.generate(asked, greedy())
        said = engine.log_text()
    assert_chosen(reference(family), asked, outputs)
    assert_chosen(reference(family), asked, again)
    assert all(output.num_cached_tokens == 0 for output in again)
    for text in (*CHANGED[family], WHY[family]):
        assert text in said


@THOROUGH
def test_a_preempted_prompt_is_recomputed_whole(checkpoint, reference, start_engine):
    """Tokens generated before a preemption are recomputed with causal attention."""
    image = pictures.image(60, 60, seed=3)
    asked = [
        {"prompt": f"{number}" * (70 + number), "multi_modal_data": {"image": [image]}}
        for number in range(4)
    ]
    options = {**LIMITS["paligemma"], "kv_cache_memory_bytes": 6 * (128 << 10)}
    with start_engine(
        checkpoint("paligemma"), environment=FUZZED, disable_log_stats=False, **options
    ) as engine:
        outputs = engine.generate(asked, greedy(60))
        preempted = engine.metrics()["vllm:num_preemptions"]
    assert preempted > 0
    assert_chosen(reference("paligemma"), asked, outputs)


TEXT = {"max_model_len": 256, "max_num_batched_tokens": 256}


@pytest.fixture(scope="module")
def hrm_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family("hrm_text", tmp_path_factory.mktemp("hrm_text") / "checkpoint")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(GRAPHS, id="graphs"),
        pytest.param(TWO_RANKS, id="tensor2", marks=THOROUGH),
        pytest.param(COMPOSED, id="composed", marks=THOROUGH),
        pytest.param({"async_scheduling": False}, id="synchronous", marks=THOROUGH),
        pytest.param(speculation("ngram", 3, prompt_lookup_max=3), id="ngram", marks=THOROUGH),
    ],
)
def test_prompts_of_text_attend_bidirectionally(options, hrm_text, start_engine):
    """Generated tokens attend causally, also when a preempted request recomputes them."""
    prompts = random_prompts([100, 105, 110, 115, 120, 125, 1, 2, 17, 64, 150])
    few = {"num_gpu_blocks_override": 6, "kv_cache_memory_bytes": None}
    asked = {**few, "gpu_memory_utilization": 0.02, "disable_log_stats": False, **TEXT, **options}
    with start_engine(hrm_text, environment=FUZZED, **asked) as engine:
        for _ in range(2):
            assert_generates(engine, TransformersReference(hrm_text), prompts, 40)
        preempted = engine.metrics()["vllm:num_preemptions"]
    assert preempted > 0


@THOROUGH
def test_prompts_of_a_causal_hrm_text_attend_causally(hrm_text: Path, start_engine: StartEngine):
    with start_engine(hrm_text, hf_overrides={"prefix_lm": False}, **TEXT) as engine:
        reference = TransformersReference(hrm_text, prefix_lm=False)
        assert_generates(engine, reference, random_prompts([3, 65, 150]), MAX_TOKENS)


def test_steps_that_do_not_hold_a_prompt_of_text_are_refused(hrm_text: Path):
    said = refusal_of(hrm_text, max_model_len=256, max_num_batched_tokens=128)
    assert "a prompt attends bidirectionally and must be prefilled in one step" in said


@pytest.mark.nightly("refusals")
def test_steps_that_do_not_hold_an_image_end_the_start(checkpoint, start_engine):
    options = {"max_num_batched_tokens": TOKENS_PER_IMAGE - 1, "max_num_seqs": 4}
    with pytest.raises(EngineError, match=r"max_num_batched_tokens|max_tokens_per_mm_item"):
        start_engine(checkpoint("gemma3"), **{**LIMITS["gemma3"], **options})


def test_steps_that_do_not_hold_a_prompt_whole_are_refused(checkpoint):
    options = {**LIMITS["paligemma"], "max_num_batched_tokens": 128}
    said = refusal_of(checkpoint("paligemma"), **options)
    assert re.search(r"--max-num-batched-tokens \(128\) .* --max-model-len \(256\)", said)
