"""Speculative decoding changes no token: any method, number of drafts and schedule."""

from pathlib import Path

import pytest

from vllm_davinci_testing.engines.drafters import KNOWING, TEXTS, WRONG
from vllm_davinci_testing.engines.fixture_types import Engines, StartEngine
from vllm_davinci_testing.engines.speculating import speculation, told, write_texts

THOROUGH = pytest.mark.thorough


# --- n-gram drafts, and drafts that are always wrong or always right ---------------------------


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
def test_ngrams_change_no_token(count, options, drafting_engine, tiny_llama):
    with drafting_engine(tiny_llama, {**speculation("ngram", count), **options}) as engine:
        drafted, accepted = told(engine)
    assert 0 < accepted < drafted


def test_wrong_drafts_change_no_token(drafting_engine: Engines, tiny_llama: Path):
    with drafting_engine(tiny_llama, speculation("custom_class", 4, model=WRONG)) as engine:
        drafted, accepted = told(engine)
        assert drafted > 500
        assert accepted < drafted / 4


def test_drafts_of_one_who_knows_are_all_accepted(drafting_engine, undrafted, tiny_llama, tmp_path):
    known = write_texts(tmp_path / "texts.json", undrafted(tiny_llama))
    asked = {**speculation("custom_class", 3, model=KNOWING), "enforce_eager": False}
    with drafting_engine(tiny_llama, asked, **{TEXTS: str(known)}) as engine:
        drafted, accepted = told(engine)
        (replays,) = engine.on_workers("graph_replays")
    assert sum(replays.values()) > 10
    assert all(tokens % 4 == 0 for tokens in replays)
    assert drafted == accepted > 200


@THOROUGH
@pytest.mark.parametrize("model", ["qwen3_norm_head128_gqa2", "mistral_window32_head80_gqa2"])
def test_wrong_drafts_change_no_token_of_other_families(model, drafting_engine, zoo):
    with drafting_engine(zoo(model), speculation("custom_class", 3, model=WRONG)):
        pass


# --- what is refused ---------------------------------------------------------------------------


def test_a_method_that_is_not_served_ends_the_start(start_engine: StartEngine, tiny_llama: Path):
    with pytest.raises(Exception, match="method 'ngram_gpu' of --speculative-config"):
        start_engine(tiny_llama, **speculation("ngram_gpu", 2))
