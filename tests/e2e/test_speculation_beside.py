"""Drafts with other features: no token changes, and acceptance stays the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from vllm.lora.request import LoRARequest

from vllm_davinci.core.export.exporter import Exporter
from vllm_davinci_testing.engines import adapters
from vllm_davinci_testing.engines.dp_engines import DPEngines
from vllm_davinci_testing.engines.eagle_checkpoint import random_eagle, random_eagle3
from vllm_davinci_testing.engines.engine_process import EngineProcess
from vllm_davinci_testing.engines.fixture_types import Engines
from vllm_davinci_testing.engines.int8_checkpoint import input_ranges
from vllm_davinci_testing.engines.mtp_checkpoint import with_random_mtp
from vllm_davinci_testing.engines.preemption import few_blocks
from vllm_davinci_testing.engines.speculating import (
    RACES,
    REQUESTS,
    SMALL,
    first_wrong,
    generate,
    greedy,
    speculation,
    texts,
    told,
    with_logprobs,
)
from vllm_davinci_testing.engines.split_settings import SPLIT_ALWAYS

pytestmark = pytest.mark.nightly("layouts")

THOROUGH = pytest.mark.thorough
GRAPHS = {"enforce_eager": False}
TP2 = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
# Drafted and accepted tokens of the random MTP layer with three drafts, as measured without other
# features.
ACCEPTED = (951, 66)


@pytest.fixture(scope="module")
def mtp(tiny_deepseek: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_random_mtp(tiny_deepseek, tmp_path_factory.mktemp("mtp") / "checkpoint")


# --- data parallelism --------------------------------------------------------------------------


def generate_on(engines: DPEngines, counts: list[int]) -> list[list[list[int]]]:
    """Returns each DP rank's tokens; DP rank r gets the first counts[r] requests of `texts`."""

    def of_rank(rank: int, engine: EngineProcess) -> list[list[int]]:
        first = range(counts[rank])
        outputs = engine.generate([texts()[n] for n in first], [greedy(n) for n in first])
        return [list(output.outputs[0].token_ids) for output in outputs]

    return engines._on_all(of_rank)


@pytest.mark.parametrize(
    ("count", "options"),
    [
        pytest.param(3, {**GRAPHS, "enable_expert_parallel": True}, id="3_ep_graphs"),
        pytest.param(1, {"enable_expert_parallel": True}, id="1_ep", marks=THOROUGH),
        pytest.param(
            2, {**TP2, **GRAPHS, "enable_expert_parallel": True}, id="2_ep_tp2", marks=THOROUGH
        ),
        pytest.param(2, {"async_scheduling": False}, id="2_sync", marks=THOROUGH),
    ],
)
def test_ranks_without_requests_draft_along(count, options, start_engine, mtp, undrafted):
    """Both ranks are busy; then one rank finishes after its first token and joins the other's
    passes idle.
    """
    asked = {**speculation("mtp", count), **options}
    with DPEngines(start_engine, mtp, 2, RACES, **asked) as engines:
        for counts in ([REQUESTS, REQUESTS], [1, REQUESTS]):
            found = generate_on(engines, counts)
            assert found == [undrafted(mtp)[:many] for many in counts]
        drafted, accepted = told(engines.engines[0])
        replays = engines.on_workers("graph_replays")
    assert 0 < accepted < drafted
    assert all(bool(each) == (options.get("enforce_eager") is False) for each in replays)


# --- ubatches, a cache in the host's memory, sleep ---------------------------------------------


def dbo(**options: Any) -> dict[str, Any]:
    return {**TP2, "additional_config": {"dbo": {**SPLIT_ALWAYS, **options}}}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({**dbo(split="token"), **GRAPHS}, id="token_graphs"),
        pytest.param(dbo(split="token"), id="token", marks=THOROUGH),
        pytest.param({**dbo(split="request"), **GRAPHS}, id="request_graphs", marks=THOROUGH),
        pytest.param(dbo(num_ubatches=3, split="token"), id="thirds", marks=THOROUGH),
    ],
)
def test_steps_with_drafts_are_split(options: dict[str, Any], drafting_engine: Engines, mtp: Path):
    """Verification is split between requests; the drafter gets the hidden states of whole steps."""
    with drafting_engine(mtp, {**speculation("mtp", 3), **options}) as engine:
        assert told(engine) == ACCEPTED
        decisions = engine.on_workers("overlap_decisions")[0]
    is_graph = options.get("enforce_eager") is False
    assert decisions["split"] > (3 if is_graph else 30)
    assert (decisions.get("split_replay", 0) > 30) == is_graph


@THOROUGH
def test_auxiliary_states_of_split_steps_are_whole(drafting_engine, repository, tiny_llama):
    head = {"model": str(repository / "checkpoints" / "tiny_llama_eagle3")}
    found = []
    for options in (TP2, dbo()):
        asked = {**speculation("eagle3", 3, **head), **options}
        with drafting_engine(tiny_llama, asked) as engine:
            found.append(told(engine))
    assert found[0] == found[1]


@THOROUGH
def test_drafts_continue_on_blocks_loaded_from_host_memory(drafting_engine, undrafted, mtp):
    asked = {**speculation("mtp", 3), **few_blocks(12), "kv_offloading_size": 0.25}
    with drafting_engine(mtp, asked) as engine:
        assert generate(engine) == undrafted(mtp)
        assert engine.metrics()["vllm:external_prefix_cache_hits"] > 0
        drafted, accepted = told(engine)
    assert abs(accepted / drafted - ACCEPTED[1] / ACCEPTED[0]) < 0.01


@THOROUGH
def test_drafters_sleep_and_wake_with_their_model(drafting_engine, undrafted, mtp):
    expected = undrafted(mtp)
    options = {
        "enable_sleep_mode": True,
        "worker_extension_cls": "vllm_davinci_testing.engines.sleeping_worker.SleepingWorker",
    }
    asked = {**speculation("mtp", 3), **GRAPHS, **options}
    with drafting_engine(mtp, asked) as engine:
        engine.sleep(level=1)
        engine.wake_up()
        assert generate(engine) == expected
        engine.sleep(level=2)
        engine.wake_up(tags=["weights"])
        engine.on_workers("reload_weights")
        engine.wake_up(tags=["kv_cache"])
        assert generate(engine) == expected
        # The drafter's weights were restored, too.
        assert told(engine) == tuple(3 * number for number in ACCEPTED)


# --- adapters ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "options"),
    [
        pytest.param("ngram", {}, id="ngram", marks=THOROUGH),
        pytest.param("eagle3", GRAPHS, id="eagle3_graphs", marks=THOROUGH),
        pytest.param("eagle", {}, id="eagle", marks=THOROUGH),
        pytest.param("draft_model", GRAPHS, id="draft_model_graphs", marks=THOROUGH),
        pytest.param("mtp", {}, id="mtp", marks=THOROUGH),
    ],
)
def test_adapters_change_the_same_tokens_with_drafts(
    method, options, start_engine, tiny_llama, mtp, tmp_path
):
    """Each step mixes requests with two adapters (all layers, embeddings, heads) and without."""
    target = mtp if method == "mtp" else tiny_llama
    network = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    where = adapters.LINEAR if method == "mtp" else adapters.EVERYWHERE
    paths = [
        adapters.write_adapter(network, tmp_path / f"{rank}", rank, seed=rank, targets=where)
        for rank in (8, 16)
    ]
    requests = [LoRARequest(str(n), n, str(path)) for n, path in enumerate(paths, start=1)]
    asked = [[*requests, None][n % 3] for n in range(REQUESTS)]
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16}
    write = {"eagle": random_eagle, "eagle3": random_eagle3}.get(method)
    own = {"draft_model": tiny_llama} if write is None else {method: write(target, tmp_path / "h")}
    drafter = {"model": str(own[method])} if method in own else {}
    with start_engine(target, **SMALL, **lora) as engine:
        expected = generate(engine, adapters=asked)
        assert expected != generate(engine)
    options = {**speculation(method, 3, **drafter), **lora, **options}
    with start_engine(target, environment=RACES, **options) as engine:
        assert generate(engine, adapters=asked) == expected
        assert told(engine)[0] > 30


# --- quantized models --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        pytest.param("static", "eagle3", id="static_eagle3", marks=THOROUGH),
        pytest.param("dynamic", "eagle3", id="dynamic_eagle3", marks=THOROUGH),
        pytest.param("dynamic", "mtp", id="dynamic_mtp", marks=THOROUGH),
        pytest.param("dynamic", "ngram", id="dynamic_ngram", marks=THOROUGH),
    ],
)
def test_int8_models_keep_their_tokens(
    kind, method, start_engine, repository, tiny_llama, tmp_path
):
    checkpoints = repository / "checkpoints"
    source = checkpoints / ("tiny_deepseek" if method == "mtp" else "tiny_llama")
    scheme = {"static": "W8A8", "dynamic": "W8A8_DYNAMIC"}[kind]
    ranges = {}
    if kind == "static":
        ranges = input_ranges(source, [torch.arange(3, 203).unsqueeze(0)])
    target = tmp_path / "int8"
    Exporter(source, target, scheme, torch.bfloat16, ranges).run(lambda _: None)
    drafter = {"model": str(checkpoints / "tiny_llama_eagle3")} if method == "eagle3" else {}
    options = {"dtype": "bfloat16", "quantization": "ascend"}
    with start_engine(target, **SMALL, **options) as engine:
        expected = with_logprobs(engine)
    asked = {**speculation(method, 3, **drafter), **options}
    with start_engine(target, environment=RACES, **asked) as engine:
        found = generate(engine)
        drafted, accepted = told(engine)
    assert not first_wrong(expected, found)
    assert drafted > 30 and accepted > 0
