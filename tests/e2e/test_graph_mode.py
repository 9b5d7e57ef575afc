"""Decode steps replayed from captured graphs give eager steps' tokens, on every path.

Steps are padded, because requests end at different times and few sizes are captured. `-m thorough`
runs all cases and 20 seeds of the random schedule.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from vllm_davinci_testing.engines.dp_engines import DPEngines
from vllm_davinci_testing.engines.fixture_types import Prompts
from vllm_davinci_testing.engines.graph_settings import CAPTURED, SIZES
from vllm_davinci_testing.engines.int8_checkpoint import write_int8
from vllm_davinci_testing.engines.split_settings import SPLIT_ALWAYS

THOROUGH = pytest.mark.thorough
DENSE = "llama_head64_gqa4"
MLA = "tiny_deepseek"
EXPERTS = "qwen3_moe_softmax_top2_of_8"
WIDE = "qwen3_moe_hidden1024"  # fused launches require 16 bits
INT8 = {"int8_llama": "tiny_llama", "int8_deepseek": "tiny_deepseek"}
CHIP_WITH_FUSED_LAUNCHES = {"VNPU_SOC": "Ascend910_9391"}

SMALL = {"max_num_seqs": 8, "max_num_batched_tokens": 512}
SIDE_STREAMS = {
    "torchair_graph_config": {"enable_multistream_mla": True, "enable_multistream_moe": True},
    "weight_prefetch_config": {"enabled": True, "min_bytes": 0},
}
TP2 = {"tensor_parallel_size": 2}
EP2 = {**TP2, "enable_expert_parallel": True}
PP2 = {"pipeline_parallel_size": 2}
DP2 = {"count": 2, "enable_expert_parallel": True}
DP2TP2 = {**DP2, **TP2}
BF16 = {"dtype": "bfloat16"}
SPLIT_PREFILLS = {"additional_config": {"dbo": {"enabled": True, "min_total_tokens_to_split": 2}}}
SPLIT = {"additional_config": {"dbo": SPLIT_ALWAYS}}
ALL_TO_ALL = {"additional_config": {"moe_communication": "all_to_all"}}

CASES = [
    pytest.param(DENSE, {}, {}, id="dense", marks=THOROUGH),
    pytest.param(DENSE, BF16, {}, id="dense_bf16", marks=THOROUGH),
    pytest.param("mistral_window32_head80_gqa2", {}, {}, id="window", marks=THOROUGH),
    pytest.param(DENSE, {"async_scheduling": False}, {}, id="sync", marks=THOROUGH),
    pytest.param(DENSE, TP2, {}, id="dense_tp2", marks=THOROUGH),
    pytest.param(DENSE, PP2, {}, id="dense_pp2", marks=THOROUGH),
    pytest.param(
        DENSE, {**TP2, **SPLIT_PREFILLS}, {}, id="dense_tp2_split_prefills", marks=THOROUGH
    ),
    pytest.param(DENSE, {**TP2, **SPLIT}, {}, id="dense_tp2_split", marks=THOROUGH),
    pytest.param(MLA, {}, {}, id="mla", marks=THOROUGH),
    pytest.param(MLA, BF16, {}, id="mla_bf16", marks=THOROUGH),
    pytest.param(
        MLA, {"additional_config": SIDE_STREAMS}, {}, id="mla_side_streams", marks=THOROUGH
    ),
    pytest.param(MLA, TP2, {}, id="mla_tp2", marks=THOROUGH),
    pytest.param(MLA, {**TP2, **SPLIT}, {}, id="mla_tp2_split"),
    pytest.param(
        MLA,
        {**EP2, "additional_config": {"dbo": SPLIT_ALWAYS, **SIDE_STREAMS}},
        {},
        id="mla_ep2_split_side",
        marks=THOROUGH,
    ),
    pytest.param(
        MLA, {**EP2, "additional_config": SIDE_STREAMS}, {}, id="mla_ep2_side", marks=THOROUGH
    ),
    pytest.param(MLA, PP2, {}, id="mla_pp2", marks=THOROUGH),
    pytest.param(
        MLA,
        {**TP2, "additional_config": {"sequence_parallel": {"min_tokens": 1}}},
        {},
        id="mla_sequence_parallel",
        marks=THOROUGH,
    ),
    pytest.param(
        MLA,
        {
            "enforce_eager": False,
            "additional_config": {
                "torchair_graph_config": {
                    "enabled": True,
                    "use_cached_graph": True,
                    "graph_batch_sizes": [3, 2, 64],
                }
            },
        },
        {},
        id="mla_by_key",
        marks=pytest.mark.nightly("layouts"),
    ),
    pytest.param(MLA, DP2, {}, id="mla_dp2", marks=THOROUGH),
    pytest.param(
        MLA, {**DP2, "additional_config": SIDE_STREAMS}, {}, id="mla_dp2_side", marks=THOROUGH
    ),
    pytest.param(MLA, DP2TP2, {}, id="mla_dp2tp2", marks=THOROUGH),
    pytest.param(EXPERTS, {}, {}, id="experts", marks=THOROUGH),
    pytest.param(EXPERTS, EP2, {}, id="experts_ep2", marks=THOROUGH),
    pytest.param(EXPERTS, DP2, {}, id="experts_dp2", marks=THOROUGH),
    pytest.param(EXPERTS, {**DP2, **ALL_TO_ALL}, {}, id="experts_dp2_all_to_all", marks=THOROUGH),
    pytest.param(
        EXPERTS,
        {**DP2, "additional_config": {"moe_communication": "all_to_all", "dbo": SPLIT_ALWAYS}},
        {},
        id="experts_dp2_all_to_all_split",
        marks=THOROUGH,
    ),
    pytest.param(EXPERTS, {**DP2, **SPLIT}, {}, id="experts_dp2_split", marks=THOROUGH),
    pytest.param(
        WIDE, {**DP2, **BF16}, CHIP_WITH_FUSED_LAUNCHES, id="experts_fused", marks=THOROUGH
    ),
    pytest.param("int8_llama", BF16, {}, id="int8_dense", marks=THOROUGH),
    pytest.param("int8_deepseek", BF16, {}, id="int8_mla", marks=THOROUGH),
    pytest.param("int8_deepseek", {**TP2, **BF16}, {}, id="int8_mla_tp2", marks=THOROUGH),
]

Start = Callable[..., DPEngines]


@pytest.fixture(scope="module")
def checkpoint(
    repository: Path, zoo: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Returns a model by name: shipped, an int8 export, or from the zoo."""
    made: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name == MLA:
            return repository / "checkpoints" / name
        if name not in INT8:
            return zoo(name)
        if name not in made:
            source = repository / "checkpoints" / INT8[name]
            made[name] = tmp_path_factory.mktemp("int8") / name
            kind = "W8A8" if name == "int8_llama" else "W8A8_DYNAMIC"
            write_int8(source, made[name], kind, range(40, 90))
        return made[name]

    return find


@pytest.fixture
def start(start_engine: Callable[..., Any], checkpoint: Callable[[str], Path]) -> Start:
    def begin(model: str, options: dict[str, Any], environment: dict[str, str]) -> DPEngines:
        several = options.get("count", 1) > 1
        own = {"distributed_executor_backend": "mp"} if "_size" in str(options) else {}
        if several:
            environment = {**environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        settings = {**SMALL, **own, **options}
        return DPEngines(start_engine, checkpoint(model), environment=environment, **settings)

    return begin


def plain(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options without graph mode."""
    config = dict(options.get("additional_config", {}))
    if config.get("torchair_graph_config", {}).get("enabled"):
        del config["torchair_graph_config"]
    return config


def generate(engines: DPEngines, prompts: list[list[int]]) -> list[list[int]]:
    """Generates greedily for requests that end at different times."""
    chosen = [prompt[:40] for prompt in prompts[:14]]
    parameters = [
        SamplingParams(temperature=0, max_tokens=6 + 5 * (number % 4), ignore_eos=True)
        for number in range(len(chosen))
    ]
    count = len(engines.engines)
    with_parameters = [(chosen[rank::count], parameters[rank::count]) for rank in range(count)]
    found: list[Any] = [None] * len(chosen)
    outputs = engines._on_all(
        lambda rank, engine: engine.generate(
            [{"prompt_token_ids": prompt} for prompt in with_parameters[rank][0]],
            with_parameters[rank][1],
        )
    )
    for rank, of_rank in enumerate(outputs):
        found[rank::count] = [list(output.outputs[0].token_ids) for output in of_rank]
    return found


# The plan covers the capture's resources, and exceeds them at most by this factor and, for memory,
# by the allocator's rounding per graph.
MOST_PLANNED = 1.5
ROUNDED_BYTES = 2 << 20


def check_plan(engines: DPEngines, is_split: bool) -> None:
    """Compares the plan with the graphs' use, as counted by torch_npu and the virtual device."""
    for planned, held in engines.on_workers("planned_and_held"):
        assert planned["graphs"] == held["graphs"] == len(SIZES)
        assert planned["updatable_tasks"] == held["updatable_tasks"]
        for name in ("streams", "events"):
            assert held[name] <= planned[name] <= MOST_PLANNED * held[name], (name, planned, held)
        rounding = ROUNDED_BYTES * len(SIZES)
        assert abs(planned["memory"] - held["memory"]) <= rounding, (planned, held)
    for decisions in engines.on_workers("overlap_decisions"):
        assert bool(decisions.get("split_replay")) == is_split


@pytest.mark.parametrize(("model", "options", "environment"), CASES)
def test_tokens_equal_those_of_eager_steps(model, options, environment, start, prompts):
    eager = start(
        model, {**options, "enforce_eager": True, "additional_config": plain(options)}, environment
    )
    expected = generate(eager, prompts)
    eager.__exit__()
    checked = {**environment, "VNPU_RACES": "raise", "VNPU_SCHEDULE": "fuzz:11"}
    asked_by_key = "enforce_eager" in options
    captured = start(model, options if asked_by_key else {**options, **CAPTURED}, checked)
    assert generate(captured, prompts) == expected
    for replays in captured.on_workers("graph_replays"):
        assert set(replays) <= set(SIZES)
        assert sum(replays.values()) > 10
    if not asked_by_key:
        is_split = options.get("additional_config", {}).get("dbo") is SPLIT_ALWAYS
        check_plan(captured, is_split)
    captured.__exit__()
    assert "vnpu: race" not in captured.log_text()


FUZZED = {"dense": (DENSE, TP2), "mla": (MLA, {"additional_config": SIDE_STREAMS})}


@pytest.fixture(scope="module")
def eager_tokens() -> dict[str, list[list[int]]]:
    """Eager engines' tokens by fuzzed model; a model's first seed adds them."""
    return {}


@THOROUGH
@pytest.mark.parametrize("seed", range(20))
def test_any_order_gives_the_tokens_of_eager_steps(seed, start, prompts, eager_tokens):
    name = sorted(FUZZED)[seed % 2]
    model, options = FUZZED[name]
    if name not in eager_tokens:
        eager = start(model, options, {})
        eager_tokens[name] = generate(eager, prompts)
        eager.__exit__()
    captured = start(
        model, {**options, **CAPTURED}, {"VNPU_RACES": "raise", "VNPU_SCHEDULE": f"fuzz:{seed}"}
    )
    assert generate(captured, prompts) == eager_tokens[name]
    captured.__exit__()
    assert "vnpu: race" not in captured.log_text()


# Missing resource: its log line, and the sizes still captured. Four streams suffice for two graphs.
WITHOUT: dict[str, tuple[str, set[int]]] = {
    "streams": ("2 tokens: RuntimeError: .*EE1023: 2 more streams", {3, 8}),
    "events": ("2 tokens: RuntimeError: .*EE1023: .* more events", {3, 8}),
    "memory": ("8 tokens: 3 sizes were requested, and the device has .* of memory left", set()),
}


@pytest.mark.nightly("faults")
def test_a_size_that_cannot_be_captured_is_given_up_by_all_ranks(start: Start, prompts: Prompts):
    engines = start(DENSE, {**TP2, **CAPTURED}, {"VNPU_MEMORY": "2GiB"})
    expected = generate(engines, prompts)
    engines.engines[0].on_workers("capture_again_with_a_failure", SIZES, 3, 1)
    before = engines.on_workers("graph_replays")
    assert generate(engines, prompts) == expected
    for old, new in zip(before, engines.on_workers("graph_replays"), strict=True):
        assert {size for size in new if new[size] > old.get(size, 0)} == {2, 8}
    log = engines.log_text()
    assert "Graph mode continues without some sizes" in log
    assert "3 tokens: another rank could not" in log
    for what, (reason, left) in WITHOUT.items():
        engines.on_workers("capture_again_without", SIZES, what)
        assert generate(engines, prompts) == expected
        assert all(set(replays) == left for replays in engines.on_workers("graph_replays")), what
        assert re.search(reason, engines.log_text(), re.DOTALL), what
    engines.__exit__()
