"""Speculative decoding changes no token: any method, number of drafts and schedule."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from vllm_davinci_testing.engines.drafters import KNOWING, TEXTS, WRONG
from vllm_davinci_testing.engines.eagle_checkpoint import random_eagle
from vllm_davinci_testing.engines.fixture_types import Engines, StartEngine
from vllm_davinci_testing.engines.speculating import generate, speculation, told, write_texts

THOROUGH = pytest.mark.thorough
NEEDS_ARCTIC = pytest.mark.skipif(
    find_spec("arctic_inference") is None,
    reason="suffix trees need arctic-inference: docs/guides/speculative_decoding.md",
)


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


@NEEDS_ARCTIC
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"enforce_eager": False}, id="graphs", marks=THOROUGH),
        pytest.param({"num_gpu_blocks_override": 8}, id="few_blocks", marks=THOROUGH),
    ],
)
def test_suffix_trees_change_no_token(options, drafting_engine, undrafted, tiny_llama):
    """Runs twice: the second run finds the first run's texts in its tree."""
    with drafting_engine(tiny_llama, {**speculation("suffix", 4), **options}) as engine:
        first = told(engine)
        assert generate(engine) == undrafted(tiny_llama)
        both = told(engine)
    assert first[1] > 0
    # The second run drafts the first run's texts, so nearly all drafts are accepted.
    assert (both[1] - first[1]) / (both[0] - first[0]) > 0.9


@THOROUGH
@pytest.mark.parametrize(
    ("name", "method", "count"),
    [
        *(("tiny_deepseek", "ngram", count) for count in (1, 2, 3, 4)),
        ("tiny_deepseek", "custom_class", 3),
        *(("tiny_llama", method, count) for method in ("eagle", "draft_model") for count in (1, 4)),
        ("tiny_llama", "ngram", 2),
    ],
)
def test_no_number_of_drafts_from_graphs_changes_a_token(
    name, method, count, drafting_engine, repository, tmp_path
):
    target = repository / "checkpoints" / name
    own = {"custom_class": WRONG, "draft_model": str(target)}
    if method == "eagle":
        own[method] = str(random_eagle(target, tmp_path / "drafter"))
    drafter = {"model": own[method]} if method in own else {}
    asked = {**speculation(method, count, **drafter), "enforce_eager": False}
    with drafting_engine(target, asked) as engine:
        drafted, accepted = told(engine)
    assert drafted > 0
    if method == "draft_model":  # the draft model is the model itself
        assert accepted == drafted


# --- what is refused ---------------------------------------------------------------------------


def test_a_method_that_is_not_served_ends_the_start(start_engine: StartEngine, tiny_llama: Path):
    with pytest.raises(Exception, match="method 'ngram_gpu' of --speculative-config"):
        start_engine(tiny_llama, **speculation("ngram_gpu", 2))


def test_without_its_package_the_method_says_what_to_install(start_engine, tiny_llama):
    if find_spec("arctic_inference") is not None:
        pytest.skip("arctic-inference is installed")
    with pytest.raises(Exception, match="pip install arctic-inference"):
        start_engine(tiny_llama, **speculation("suffix", 2))
