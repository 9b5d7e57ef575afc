"""Speculative decoding changes no token: whatever drafts, however many, whatever the schedule."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from vllm_davinci_testing.engines.drafters import KNOWING, TEXTS, WRONG
from vllm_davinci_testing.engines.engine_process import EngineProcess

THOROUGH = pytest.mark.thorough
REQUESTS = 12
RACES = {"VNPU_RACES": "raise", "VNPU_SCHEDULE": "fuzz:7"}
SMALL = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "disable_log_stats": False}
Engines = Callable[..., EngineProcess]


def texts() -> list[dict[str, Any]]:
    """Prompts of 1 to 140 tokens, some of which repeat themselves."""
    lengths = [1, 2, 127, 128, 129, 140, *range(10, 10 + REQUESTS - 6)]
    return [
        {"prompt_token_ids": [3 + (token * (7 + number)) % (20 + number) for token in range(n)]}
        for number, n in enumerate(lengths)
    ]


def generate(engine: EngineProcess, **options: Any) -> list[list[int]]:
    """Tokens of requests that end at different times."""
    parameters = [
        SamplingParams(
            **{"temperature": 0, "max_tokens": 24 + 5 * (n % 5), "ignore_eos": True} | options
        )
        for n in range(REQUESTS)
    ]
    outputs = engine.generate(texts(), parameters)
    return [list(output.outputs[0].token_ids) for output in outputs]


def told(engine: EngineProcess) -> tuple[int, int]:
    """Draft tokens so far, and how many of them were accepted."""
    metrics = engine.metrics()
    return (
        int(metrics["vllm:spec_decode_num_draft_tokens"]),
        int(metrics["vllm:spec_decode_num_accepted_tokens"]),
    )


def speculation(method: str, count: int, **options: Any) -> dict[str, Any]:
    return {
        "speculative_config": {"method": method, "num_speculative_tokens": count, **options},
        **SMALL,
    }


@pytest.fixture(scope="module")
def expected(start_engine: Engines, tiny_llama: Path) -> list[list[int]]:
    with start_engine(tiny_llama, **SMALL) as engine:
        return generate(engine)


# --- drafts out of the text, of a wrong drafter, of one that knows ------------------------------


@pytest.mark.parametrize(
    ("count", "options"),
    [
        pytest.param(1, {}, id="1", marks=THOROUGH),
        pytest.param(3, {}, id="3"),
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
    start_engine: Engines,
    tiny_llama: Path,
    expected: list[list[int]],
):
    asked = {**speculation("ngram", count), **options}
    with start_engine(tiny_llama, environment=RACES, **asked) as engine:
        assert generate(engine) == expected
        drafted, accepted = told(engine)
    assert 0 < accepted < drafted


def test_wrong_drafts_change_no_token(
    start_engine: Engines, tiny_llama: Path, expected: list[list[int]]
):
    asked = speculation("custom_class", 4, model=WRONG)
    with start_engine(tiny_llama, environment=RACES, **asked) as engine:
        assert generate(engine) == expected
        drafted, accepted = told(engine)
        assert drafted > 500
        assert accepted < drafted / 4


def test_drafts_of_one_who_knows_are_all_accepted(
    start_engine: Engines, tiny_llama: Path, expected: list[list[int]], tmp_path: Path
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


@pytest.mark.parametrize("model", ["qwen3_norm_head128_gqa2", "mistral_window32_head80_gqa2"])
def test_wrong_drafts_change_no_token_of_other_families(
    model: str, start_engine: Engines, zoo: Callable[[str], Path]
):
    with start_engine(zoo(model), **SMALL) as engine:
        expected = generate(engine)
    asked = speculation("custom_class", 3, model=WRONG)
    with start_engine(zoo(model), environment=RACES, **asked) as engine:
        assert generate(engine) == expected


# --- what is refused ---------------------------------------------------------------------------


def test_a_method_that_is_not_served_ends_the_start(start_engine: Engines, tiny_llama: Path):
    with pytest.raises(Exception, match="speculative decoding of method 'ngram_gpu'"):
        start_engine(tiny_llama, **speculation("ngram_gpu", 2))
