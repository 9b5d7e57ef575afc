"""Drafts with sparse attention: any method leaves the tokens of an engine without drafts."""

from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_davinci_testing.engines.drafters import KNOWING, TEXTS, WRONG
from vllm_davinci_testing.engines.fixture_types import Engines, Undrafted
from vllm_davinci_testing.engines.mtp_checkpoint import with_random_mtp
from vllm_davinci_testing.engines.speculating import speculation, told, write_texts

THOROUGH = pytest.mark.thorough
DEEPSEEK, SHARED = "deepseek_v32", "glm_dsa_shared"
GRAPHS = {"enforce_eager": False}
SYNCHRONOUS = {"async_scheduling": False}
TP2 = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
FEW_BLOCKS = {"num_gpu_blocks_override": 8, "enable_prefix_caching": True}


@pytest.fixture(scope="module")
def checkpoints(
    zoo: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Each model with a random MTP layer."""
    directory = tmp_path_factory.mktemp("sparse_mtp")
    return {name: with_random_mtp(zoo(name), directory / name) for name in (DEEPSEEK, SHARED)}


@pytest.mark.parametrize(
    ("model", "count", "options"),
    [
        pytest.param(SHARED, 3, GRAPHS, id="shared_3_graphs", marks=pytest.mark.nightly("layouts")),
        pytest.param(DEEPSEEK, 1, GRAPHS, id="1_graphs", marks=THOROUGH),
        pytest.param(DEEPSEEK, 2, SYNCHRONOUS, id="2_sync", marks=THOROUGH),
        pytest.param(DEEPSEEK, 4, {"max_num_batched_tokens": 48}, id="4_chunked", marks=THOROUGH),
        pytest.param(DEEPSEEK, 3, FEW_BLOCKS, id="3_few_blocks", marks=THOROUGH),
        pytest.param(DEEPSEEK, 2, {**TP2, **GRAPHS}, id="2_tp2_graphs", marks=THOROUGH),
    ],
)
def test_mtp_changes_no_token(model, count, options, drafting_engine, checkpoints):
    asked = {**speculation("mtp", count), **options}
    with drafting_engine(checkpoints[model], asked) as engine:
        drafted, accepted = told(engine)
        replays = engine.on_workers("draft_replays")[0]
    print(f"{model}: {accepted} of {drafted} drafts accepted")
    assert 0 < accepted < drafted
    assert bool(replays) == (options.get("enforce_eager") is False)


@THOROUGH
def test_drafts_of_one_who_knows_are_all_accepted(
    drafting_engine: Engines, undrafted: Undrafted, checkpoints: dict[str, Path], tmp_path: Path
):
    known = write_texts(tmp_path / "texts.json", undrafted(checkpoints[SHARED]))
    asked = {**speculation("custom_class", 3, model=KNOWING), **GRAPHS}
    with drafting_engine(checkpoints[SHARED], asked, **{TEXTS: str(known)}) as engine:
        drafted, accepted = told(engine)
    assert drafted == accepted > 200


@THOROUGH
@pytest.mark.parametrize(
    ("method", "options"), [("ngram", {"prompt_lookup_min": 1}), ("custom_class", {"model": WRONG})]
)
def test_drafts_out_of_the_text_change_no_token(method, options, drafting_engine, checkpoints):
    asked = {**speculation(method, 3, **options), **GRAPHS}
    with drafting_engine(checkpoints[DEEPSEEK], asked) as engine:
        assert told(engine)[0] > 30
