"""Kimi-K3's text: the tokens of its equations in plain torch, on every path of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm_davinci.core.checkpoint.check import check_checkpoint
from vllm_davinci_testing.engines.fixture_types import StartEngine
from vllm_davinci_testing.engines.generating import (
    FUZZED,
    IN_PARTS,
    TWO_RANKS,
    TWO_STAGES,
    assert_generates,
    paths,
    random_prompts,
)
from vllm_davinci_testing.engines.kimi_k3_checkpoint import KimiK3Reference, write_kimi_k3
from vllm_davinci_testing.engines.refusals import refusal_of

MAX_TOKENS = 12
OF_TEXT = {"max_model_len": 256, "language_model_only": True}
LENGTHS = [1, 3, 4, 63, 65, 128, 150]  # around the convolution's width and the rule's chunks


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_kimi_k3(tmp_path_factory.mktemp("kimi_k3"))


@pytest.mark.parametrize(
    "options",
    paths(
        {
            "whole": {},
            "tensor2_in_parts": {**TWO_RANKS, **IN_PARTS},
            "expert2": {**TWO_RANKS, "enable_expert_parallel": True},
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
