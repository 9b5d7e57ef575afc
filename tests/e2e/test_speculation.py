"""Speculative decoding changes no token: any method, number of drafts and schedule."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_davinci_testing.engines.drafters import KNOWING, TEXTS, WRONG
from vllm_davinci_testing.engines.engine_process import EngineProcess
from vllm_davinci_testing.engines.fixture_types import StartEngine, Zoo
from vllm_davinci_testing.engines.speculating import (
    RACES,
    SMALL,
    generate,
    speculation,
    texts,
    told,
)

THOROUGH = pytest.mark.thorough
Engines = Callable[..., EngineProcess]


@pytest.fixture(scope="module")
def expected(start_engine: Engines, tiny_llama: Path) -> list[list[int]]:
    with start_engine(tiny_llama, **SMALL) as engine:
        return generate(engine)


# --- drafts out of the text, of a wrong drafter, of one that knows ------------------------------


@pytest.mark.parametrize(
    ("count", "options"),
    [
        pytest.param(1, {}, id="1", marks=THOROUGH),
        pytest.param(3, {}, id="3", marks=THOROUGH),
        pytest.param(4, {"max_num_batched_tokens": 48}, id="4_chunked"),
        pytest.param(
            3,
            {"num_gpu_blocks_override": 8, "enable_prefix_caching": True},
            id="3_few_blocks",
            marks=THOROUGH,
        ),
        pytest.param(
            2,
            {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
            id="2_tp2",
            marks=THOROUGH,
        ),
    ],
)
def test_ngrams_change_no_token(
    count: int,
    options: dict[str, Any],
    start_engine: StartEngine,
    tiny_llama: Path,
    expected: list[list[int]],
):
    asked = {**speculation("ngram", count), **options}
    with start_engine(tiny_llama, environment=RACES, **asked) as engine:
        assert generate(engine) == expected
        drafted, accepted = told(engine)
    assert 0 < accepted < drafted


def test_wrong_drafts_change_no_token(
    start_engine: StartEngine, tiny_llama: Path, expected: list[list[int]]
):
    asked = speculation("custom_class", 4, model=WRONG)
    with start_engine(tiny_llama, environment=RACES, **asked) as engine:
        assert generate(engine) == expected
        drafted, accepted = told(engine)
        assert drafted > 500
        assert accepted < drafted / 4


def test_drafts_of_one_who_knows_are_all_accepted(
    start_engine: StartEngine, tiny_llama: Path, expected: list[list[int]], tmp_path: Path
):
    pairs = zip(texts(), expected, strict=True)
    whole = [text["prompt_token_ids"] + tokens for text, tokens in pairs]
    known = tmp_path / "texts.json"
    known.write_text(json.dumps(whole))
    asked = speculation("custom_class", 3, model=KNOWING)
    environment = {**RACES, TEXTS: str(known)}
    asked["enforce_eager"] = False
    with start_engine(tiny_llama, environment=environment, **asked) as engine:
        assert generate(engine) == expected
        drafted, accepted = told(engine)
        (replays,) = engine.on_workers("graph_replays")
    assert sum(replays.values()) > 10
    assert all(tokens % 4 == 0 for tokens in replays)
    assert drafted == accepted > 200


@THOROUGH
@pytest.mark.parametrize("model", ["qwen3_norm_head128_gqa2", "mistral_window32_head80_gqa2"])
def test_wrong_drafts_change_no_token_of_other_families(
    model: str, start_engine: StartEngine, zoo: Zoo
):
    with start_engine(zoo(model), **SMALL) as engine:
        expected = generate(engine)
    asked = speculation("custom_class", 3, model=WRONG)
    with start_engine(zoo(model), environment=RACES, **asked) as engine:
        assert generate(engine) == expected


# --- what is refused ---------------------------------------------------------------------------


def test_a_method_that_is_not_served_ends_the_start(start_engine: StartEngine, tiny_llama: Path):
    with pytest.raises(Exception, match="method 'ngram_gpu' of --speculative-config"):
        start_engine(tiny_llama, **speculation("ngram_gpu", 2))
