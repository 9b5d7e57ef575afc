"""Kimi-K3's text: tokens equal its equations in plain torch, on every path of a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from vllm_davinci.core.checkpoint.check import check_checkpoint
from vllm_davinci_testing.engines.dp_engines import DPEngines
from vllm_davinci_testing.engines.fixture_types import StartEngine
from vllm_davinci_testing.engines.generating import (
    FUZZED,
    IN_PARTS,
    RACES,
    TWO_RANKS,
    TWO_STAGES,
    as_inputs,
    assert_generates,
    paths,
    random_prompts,
)
from vllm_davinci_testing.engines.int8_checkpoint import as_type
from vllm_davinci_testing.engines.kimi_k3_checkpoint import KimiK3Reference, write_kimi_k3
from vllm_davinci_testing.engines.refusals import refusal_of
from vllm_davinci_testing.engines.transformers_reference import assert_greedy

MAX_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
SCORED = SamplingParams(max_tokens=1, prompt_logprobs=0)
EXPERTS_ON_TWO = {**TWO_RANKS, "enable_expert_parallel": True}
OF_TEXT = {"max_model_len": 256, "language_model_only": True}
LENGTHS = [1, 3, 4, 63, 65, 128, 150]  # around the convolution's width and the delta rule's chunk


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_kimi_k3(tmp_path_factory.mktemp("kimi_k3"))


@pytest.mark.parametrize(
    "options",
    paths(
        {
            "whole": {},
            "tensor2_in_parts": {**TWO_RANKS, **IN_PARTS},
            "expert2": EXPERTS_ON_TWO,
            "pipeline2": TWO_STAGES,
        }
    ),
)
def test_tokens_equal_those_of_the_equations_in_any_order_that_events_allow(
    options: dict[str, Any], checkpoint: Path, start_engine: StartEngine
):
    prompts = random_prompts(LENGTHS)
    with start_engine(checkpoint, environment=FUZZED, **OF_TEXT, **options) as engine:
        assert_generates(engine, KimiK3Reference(checkpoint), prompts, MAX_TOKENS)


def test_images_are_refused_and_the_files_are_complete(checkpoint: Path):
    assert "--language-model-only" in refusal_of(checkpoint)
    report = check_checkpoint(checkpoint)
    assert report.can_load, report.problems()


@pytest.mark.thorough
def test_data_parallel_ranks_of_which_one_is_idle_give_the_same_tokens(
    checkpoint: Path, start_engine: StartEngine
):
    reference, prompts = KimiK3Reference(checkpoint), random_prompts(LENGTHS)
    options = {**IN_PARTS, **OF_TEXT, "enable_expert_parallel": True}
    with DPEngines(start_engine, checkpoint, 2, environment=FUZZED, **options) as engines:
        for given in (prompts, prompts[:1], prompts):
            assert_greedy(reference, given, engines.generate(given, GREEDY), MAX_TOKENS)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["W8A8_DYNAMIC", "W4A8_DYNAMIC"])
@pytest.mark.parametrize("options", [{}, EXPERTS_ON_TWO], ids=["one_rank", "expert2"])
def test_logprobs_of_integers_are_as_close_to_the_equations_as_16_bits_allow(
    kind: str,
    options: dict[str, Any],
    checkpoint: Path,
    quantize: Callable[..., Path],
    start_engine: StartEngine,
):
    """The tolerance is the effect of rounding to 16 bits between layers."""
    directory = quantize(checkpoint, "W8A8_DYNAMIC")
    if kind != "W8A8_DYNAMIC":
        directory = as_type(quantize, checkpoint, kind, ".experts.")
    report = check_checkpoint(directory)
    assert report.can_load, report.problems()
    prompts = random_prompts(LENGTHS[1:])
    asked = {"dtype": "bfloat16", **IN_PARTS, **OF_TEXT, **options}
    environment = {**RACES, "VNPU_SOC": "Ascend910_9391"}
    with start_engine(directory, environment=environment, **asked) as engine:
        outputs = engine.generate(as_inputs(prompts), SCORED)
    ours = torch.tensor(
        [
            row[token].logprob
            for prompt, output in zip(prompts, outputs, strict=True)
            for token, row in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
        ]
    )
    exact, rounded, floats = (
        torch.cat(
            [
                reference.logprobs(each)[:-1].gather(1, torch.tensor([each[1:]]).t()).flatten()
                for each in prompts
            ]
        )
        for reference in (
            KimiK3Reference(directory),
            KimiK3Reference(directory, torch.bfloat16),
            KimiK3Reference(checkpoint),
        )
    )
    error, allowed, of_floats = (
        float((each - exact).abs().mean()) for each in (ours, rounded, floats)
    )
    print(
        f"mean error of a logprob: {error:.4f}, of 16 bits {allowed:.4f}, of floats {of_floats:.4f}"
    )
    assert error <= 1.15 * allowed
    if kind == "W4A8_DYNAMIC":  # with 8-bit weights, floats lie within the rounding of 16 bits
        assert float((ours - floats).abs().mean()) > error
