"""Mixtures of experts: transformers' tokens for every distribution of experts."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from vllm_davinci_testing.engines.engine_process import EngineError
from vllm_davinci_testing.engines.family_zoo import write_family
from vllm_davinci_testing.engines.fixture_types import Engines, Prompts, StartEngine, Zoo
from vllm_davinci_testing.engines.generating import assert_generates
from vllm_davinci_testing.engines.server_process import SMALL, ForkedServer
from vllm_davinci_testing.engines.split_settings import SPLIT_ALWAYS
from vllm_davinci_testing.engines.transformers_reference import TransformersReference
from vllm_davinci_testing.processes.waiting import becomes_true

THOROUGH = pytest.mark.thorough
MAX_TOKENS = 32
NUM_PROMPTS = 32

TOP2 = "qwen3_moe_softmax_top2_of_8"
TOP3 = "qwen3_moe_unnormalized_top3_of_16"
V2 = "deepseek_v2_moe"
V3 = "deepseek_v3_moe"
EXAONE = "exaone_moe_window32_sigmoid_top2_of_8"
MINIMAX = "minimax_m2_sigmoid_top2_of_8"
HUNYUAN = "hunyuan_moe_top2_of_8"
EXPERT2 = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
OTHERS = [pytest.param(model, marks=THOROUGH) for model in (TOP2, V2, EXAONE, HUNYUAN, MINIMAX)]


@pytest.mark.parametrize("model", [*OTHERS, TOP3, V3])
def test_tokens_equal_those_of_transformers(model: str, exact_engine: Engines, prompts: Prompts):
    with exact_engine(model, prompts[:NUM_PROMPTS], 2 * MAX_TOKENS):
        pass


@pytest.mark.parametrize(
    ("model", "ranks"),
    [
        pytest.param(TOP2, {"tensor_parallel_size": 2}, id="tensor2", marks=THOROUGH),
        pytest.param(TOP3, EXPERT2, id="expert2", marks=THOROUGH),
        pytest.param(
            TOP2,
            {"tensor_parallel_size": 4, "additional_config": {"expert_tensor_parallel_size": 2}},
            id="tensor4_expert_tensor2",
            marks=THOROUGH,
        ),
        pytest.param(EXAONE, EXPERT2, id="exaone_expert2", marks=THOROUGH),
    ],
)
def test_tokens_of_several_ranks_equal_those_of_transformers(model, ranks, exact_engine, prompts):
    options = {"distributed_executor_backend": "mp", **ranks}
    with exact_engine(model, prompts[:NUM_PROMPTS], MAX_TOKENS, **options):
        pass


@pytest.mark.nightly("layouts")
@pytest.mark.parametrize(
    "config",
    [
        {"moe_communication": "all_to_all"},
        {"moe_communication": "all_to_all", "dbo": {**SPLIT_ALWAYS, "split": "token"}},
        {},
    ],
    ids=["all_to_all", "ubatches", "all_gather"],
)
@pytest.mark.parametrize("family", ["dbrx", "laguna", "longcat_flash"])
def test_families_whose_experts_are_chosen_or_stored_otherwise(
    family: str, config: dict[str, Any], start_engine: StartEngine, prompts: Prompts, tmp_path: Path
):
    """Zero experts (LongCat), a bias added to the experts (Laguna), one tensor for all (DBRX)."""
    model = write_family(family, tmp_path / family)
    # Before it asks a platform, vLLM reads the number of experts from another key.
    named = {"hf_overrides": {"num_experts": 8}} if family == "dbrx" else {}
    races = {"VNPU_RACES": "raise", "VNPU_SCHEDULE": "fuzz:5"}
    with start_engine(
        model,
        distributed_executor_backend="mp",
        environment=races,
        max_num_batched_tokens=96,
        max_num_seqs=16,
        additional_config=config,
        **named,
        **EXPERT2,
    ) as engine:
        chosen = prompts[:NUM_PROMPTS]
        assert_generates(engine, TransformersReference(model), chosen, MAX_TOKENS)


@pytest.mark.parametrize(
    ("model", "schedule", "options"),
    [
        pytest.param(TOP2, "fuzz:1", {}, id="fuzz1", marks=THOROUGH),
        # Chunks of prompts run beside decodes.
        pytest.param(
            V3,
            "fuzz:2",
            {"max_num_batched_tokens": 48, "max_num_seqs": 16},
            id="fuzz2",
            marks=THOROUGH,
        ),
        pytest.param(
            TOP3,
            "fuzz:3",
            {
                "distributed_executor_backend": "mp",
                "tensor_parallel_size": 2,
                "enable_expert_parallel": True,
                "additional_config": {"moe_communication": "all_to_all"},
            },
            id="fuzz3_all_to_all",
        ),
    ],
)
def test_any_order_that_events_allow_gives_the_same_tokens(
    model: str, schedule: str, options: dict[str, Any], exact_engine: Engines, prompts: Prompts
):
    options = {"environment": {"VNPU_SCHEDULE": schedule}, **options}
    with exact_engine(model, prompts[:NUM_PROMPTS], MAX_TOKENS, **options):
        pass


@pytest.mark.nightly("weights")
def test_experts_placed_by_a_file_give_the_same_tokens(exact_engine, prompts, tmp_path):
    places = {0: [[7, 0, 2, 5], [1, 3, 4, 6]], 1: [[3, 2, 1, 0], [4, 7, 5, 6]]}
    layers = [
        {
            "layer_id": layer,
            "device_count": 2,
            "device_list": [
                {"device_id": rank, "device_expert": experts} for rank, experts in enumerate(ranks)
            ],
        }
        for layer, ranks in places.items()
    ]
    path = tmp_path / "map.json"
    path.write_text(json.dumps({"moe_layer_count": 2, "layer_list": layers}))
    with exact_engine(
        *(TOP2, prompts[:NUM_PROMPTS], MAX_TOKENS),
        distributed_executor_backend="mp",
        tensor_parallel_size=2,
        enable_expert_parallel=True,
        additional_config={"expert_map_path": str(path)},
    ) as engine:
        assert "3->0, 2->1, 1->2, 0->3" in engine.log_text()


@pytest.mark.parametrize(
    ("model", "options", "additional", "schemes"),
    [
        pytest.param(
            TOP2,
            ["--data-parallel-size=2", "--enable-expert-parallel"],
            {},
            {"all_gather", "all_to_all"},
            id="data2_expert2",
            marks=THOROUGH,
        ),
        pytest.param(
            TOP3,
            ["--data-parallel-size=2"],
            {"expert_tensor_parallel_size": 2},
            {"all_gather", "multicast"},
            id="data2_expert_tensor2",
            marks=THOROUGH,
        ),
        # A single request's decodes have one token, fewer than a DP rank's TP ranks.
        pytest.param(
            V3,
            ["--data-parallel-size=2", "--tensor-parallel-size=2", "--enable-expert-parallel"],
            {"moe_communication": "all_to_all"},
            {"all_to_all"},
            id="data2_tensor2_expert4",
        ),
        pytest.param(
            V3,
            ["--data-parallel-size=2", "--tensor-parallel-size=2"],
            {"moe_communication": "all_gather"},
            {"all_gather"},
            id="data2_tensor2",
            marks=THOROUGH,
        ),
    ],
)
def test_tokens_of_two_dp_ranks_equal_those_of_transformers(
    model, options, additional, schemes, zoo, reference, prompts, tmp_path
):
    log = tmp_path / "log.txt"
    server = ForkedServer(
        zoo(model),
        log,
        *SMALL,
        "--api-server-count=1",
        *options,
        f"--additional-config={json.dumps(additional)}",
    )
    try:
        server.wait_until_ready()
        # With one request, the other DP rank is idle and runs dummy steps.
        generated = [server.complete(prompts[0], 16)]
        with ThreadPoolExecutor(8) as threads:
            generated += threads.map(lambda prompt: server.complete(prompt, 16), prompts[1:16])
        server.interrupt()
        server.wait_for_end()
    finally:
        server.kill()
    for prompt, tokens in zip(prompts, generated, strict=False):
        assert len(tokens) == 16
        assert reference(model).first_difference(prompt, tokens) is None
    said = re.findall(r"Mixture of experts: (\w+), because", log.read_text(errors="replace"))
    assert set(said) == schemes


@pytest.mark.thorough
def test_a_rank_whose_row_counts_do_not_come_says_so_and_every_process_ends(
    zoo: Zoo, start_engine: StartEngine, prompts: Prompts
):
    engine = start_engine(
        zoo(TOP2),
        environment={
            # Run the engine core in its own process, as a server does.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "20",
            # Long, so that the collective before the counts does not time out first.
            "HCCL_EXEC_TIMEOUT": "60",
        },
        distributed_executor_backend="mp",
        tensor_parallel_size=2,
        enable_expert_parallel=True,
        additional_config={"moe_communication": "all_to_all", "dbo": SPLIT_ALWAYS},
    )
    _, *others = engine.processes()
    assert len(others) >= 3
    next(each for each in others if "Worker_TP1" in " ".join(each.cmdline())).suspend()
    with pytest.raises(EngineError, match="EngineDeadError"):
        engine.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts[2:6]],
            SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
        )
    log = engine.log_text()
    assert "Set HCCL_EXEC_TIMEOUT (60) below VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS (20)" in log
    assert re.search(
        r"model\.layers\.\d\.mlp\.experts: rank 0 of group 'ep' timed out after 14 s "
        "waiting for the row counts of the 2 ranks of the group",
        log,
    ), log[-8000:]
    engine.close()
    assert becomes_true(lambda: not any(process.is_running() for process in others), 60)
