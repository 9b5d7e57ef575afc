"""Every overlap feature and every pair of them, compared with no overlap, in every layout of ranks.

Virtual NPUs execute streams in a random order that the events permit, with a seed per case and the
race detector on. Requests: prompts alone, chunked prompts beside decodes, prefix-cache hits, and
rows that do not divide among ranks.

A nightly group runs three cases; `-m thorough` runs the others.
"""

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from vllm_davinci_testing.engines import model_zoo
from vllm_davinci_testing.engines.answers import Answers, answers_of, assert_near, tokens_of
from vllm_davinci_testing.engines.dp_engines import DPEngines
from vllm_davinci_testing.engines.int8_checkpoint import write_int8
from vllm_davinci_testing.engines.split_engines import random_prompts
from vllm_davinci_testing.engines.split_settings import SPLIT_ALWAYS

DUAL_BATCH = {**SPLIT_ALWAYS, "split": "token"}
FEATURES: dict[str, dict[str, Any]] = {
    "dual": {"dbo": DUAL_BATCH},
    "attention": {"torchair_graph_config": {"enable_multistream_mla": True}},
    "experts": {"torchair_graph_config": {"enable_multistream_moe": True}},
    "sp": {"sequence_parallel": {"min_tokens": 1}},
}
OFF = {"overlap": "off"}
THIRDS = {"num_ubatches": 3, "min_total_tokens_to_split": 3, "norm_vector_cores": 4}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel_size": 2},
    "ep2": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "dp2": {"count": 2, "enable_expert_parallel": True},
    "dp2tp2": {"count": 2, "tensor_parallel_size": 2, "enable_expert_parallel": True},
    "dp2tp2_dense_experts": {"count": 2, "tensor_parallel_size": 2},
    "tp4": {"tensor_parallel_size": 4},
    "tp2pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}
MLA = "tiny_deepseek"
DENSE = "llama_head64_gqa4"
EXPERTS = "qwen3_moe_softmax_top2_of_8"
WIDE = "qwen3_moe_hidden1024"  # fused launches need this hidden size on this chip, and 16 bits
CHIP = {"VNPU_SOC": "Ascend910_9391"}
INT8 = {
    "int8_llama": "tiny_llama",
    "int8_static_llama": "tiny_llama",
    "int8_deepseek": "tiny_deepseek",
    "int8_wide": WIDE,
}
IN_16_BITS = {*INT8, WIDE}
MLAS = (MLA, "int8_deepseek")


def merged(*parts: dict[str, Any]) -> dict[str, Any]:
    """Merges the options of several features into one additional_config."""
    together: dict[str, Any] = {}
    for part in parts:
        for section, options in part.items():
            inner = together.get(section, {})
            together[section] = {**inner, **options} if isinstance(options, dict) else options
    return together


def of(*names: str) -> dict[str, Any]:
    """Returns an additional_config with only these features on."""
    parts = [FEATURES[name] for name in names]
    if "sp" not in names:
        parts.append({"sequence_parallel": {"enabled": False}})
    return merged(*parts)


def scheduled(name: str) -> dict[str, Any]:
    """Returns an additional_config with a schedule that splits every divisible step."""
    thresholds = {key: value for key, value in DUAL_BATCH.items() if key != "enabled"}
    return {"overlap": name, "dbo": thresholds, "sequence_parallel": {"min_tokens": 1}}


SCHEDULES = ("published", "lean", "auto")
ALONE_AND_IN_PAIRS = [*((name,) for name in FEATURES), *combinations(FEATURES, 2)]

MARKS = {
    ("ep2", MLA, "published"): [pytest.mark.nightly("layouts")],
    ("tp2", EXPERTS, "dual+sp"): [pytest.mark.nightly("layouts")],
    ("tp2", "int8_static_llama", "sp"): [pytest.mark.nightly("layouts")],
}


def case(layout: str, model: str, name: str, config: dict[str, Any]) -> Any:
    marks = MARKS.get((layout, model, name), [pytest.mark.thorough])
    return pytest.param(layout, model, name, config, id=f"{layout}-{model}-{name}", marks=marks)


CASES = [
    # Sequence parallel (sp) is for a single DP rank: it has no effect with data parallelism.
    *(
        case(layout, MLA, "+".join(names), of(*names))
        for layout in ("tp2", "ep2", "dp2", "dp2tp2", "dp2tp2_dense_experts", "tp4", "tp2pp2")
        for names in ALONE_AND_IN_PAIRS
        if "sp" not in names or not layout.startswith("dp")
    ),
    *(
        case(layout, MLA, name, scheduled(name))
        for layout in ("tp2", "ep2", "dp2", "dp2tp2", "dp2tp2_dense_experts")
        for name in SCHEDULES
    ),
    *(
        case("tp2", MLA, f"dual+{cut}", merged(of("dual"), {"dbo": options}))
        for cut, options in {"requests": {"split": "request"}, "thirds": THIRDS}.items()
    ),
    *(case(layout, DENSE, "dual", of("dual")) for layout in ("tp2", "tp4", "tp2pp2")),
    *(case("tp2", DENSE, name, scheduled(name)) for name in SCHEDULES),
    *(
        case(layout, model, "+".join(names), of(*names))
        for layout, model in (
            *((layout, DENSE) for layout in ("tp2", "tp4", "tp2pp2")),
            *((layout, EXPERTS) for layout in ("tp2", "ep2", "tp2pp2")),
            *(("tp2", model) for model in ("int8_llama", "int8_static_llama", "int8_wide")),
        )
        for names in (("sp",), ("dual", "sp"))
    ),
    *(
        case(layout, EXPERTS, "dual", of("dual"))
        for layout in ("tp2", "ep2", "dp2", "dp2tp2", "dp2tp2_dense_experts", "tp2pp2")
    ),
    *(
        case(layout, EXPERTS, f"dual+{scheme}", merged(of("dual"), {"moe_communication": scheme}))
        for layout in ("dp2",)
        for scheme in ("all_gather", "multicast", "all_to_all")
    ),
    # Large steps run through the experts in chunks, with and without an exchange of rows.
    *(
        case(layout, model, "dual+pieces", merged(of("dual"), {"expert_piece_tokens": 16}, more))
        for layout, model, more in (
            ("ep2", "int8_deepseek", {}),
            ("dp2", "int8_deepseek", {"moe_communication": "all_to_all"}),
            ("dp2", EXPERTS, {"moe_communication": "all_gather"}),
        )
    ),
    # With several DP ranks, ubatches use fused launches by default.
    case("dp2", WIDE, "dual+fused", of("dual")),
    case("ep2", WIDE, "dual+fused", merged(of("dual"), {"moe_communication": "fused"})),
    case("dp2", "int8_wide", "fused", {**OFF, "moe_communication": "fused"}),
    case("dp2", "int8_wide", "dual+fused", of("dual")),
    *(case("tp2", "int8_llama", name, of(name)) for name in ("dual",)),
    *(
        case(layout, "int8_deepseek", "+".join(names), of(*names))
        for layout in ("tp2", "ep2", "dp2tp2")
        for names in (("dual",), ("experts",), ("attention",), ("dual", "experts"))
    ),
    case("tp2", "int8_deepseek", "lean", scheduled("lean")),
]


@pytest.fixture(scope="module")
def checkpoint(
    zoo: Callable[[str], Path], repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Returns the checkpoint of this name, written at its first use."""
    made: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name in model_zoo.BY_NAME:
            return zoo(name)
        if name not in INT8:
            return repository / "checkpoints" / name
        if name not in made:
            made[name] = tmp_path_factory.mktemp("int8") / name
            kind = "W8A8" if "static" in name else "W8A8_DYNAMIC"
            write_int8(find(INT8[name]), made[name], kind, random_prompts(8, [200])[0])
        return made[name]

    return find


Start = Callable[..., DPEngines]


@pytest.fixture(scope="module")
def start(start_engine: Callable[..., Any], checkpoint: Callable[[str], Path]) -> Start:
    """Starts DP ranks with a model in a layout."""

    def begin(layout: str, model: str, config: dict[str, Any], **environment: str) -> DPEngines:
        ranks = dict(LAYOUTS[layout])
        if set(ranks) - {"count", "enable_expert_parallel"}:
            ranks["distributed_executor_backend"] = "mp"
        return DPEngines(
            start_engine,
            checkpoint(model),
            environment={**(CHIP if model in (WIDE, "int8_wide") else {}), **environment},
            additional_config=config,
            dtype="bfloat16" if model in IN_16_BITS else "float32",
            max_num_batched_tokens=224,
            max_num_seqs=16,
            max_logprobs=2,
            worker_extension_cls="vllm_davinci_testing.engines.roles_worker.RolesWorker",
            **ranks,
        )

    return begin


Expected = Callable[..., Answers]


@pytest.fixture(scope="module")
def without_overlap(start: Start) -> Expected:
    """Returns answers without overlap, or with some features, by layout and model."""
    known: dict[tuple[str, ...], Answers] = {}

    def answers(layout: str, model: str, *features: str) -> Answers:
        key = (layout, model, *features)
        if key not in known:
            with start(layout, model, of(*features) if features else OFF) as engine:
                known[key] = answers_of(engine)
        return known[key]

    return answers


@pytest.mark.parametrize(("layout", "model", "name", "config"), CASES)
def test_answers_are_equal_with_and_without_overlap(
    layout, model, name, config, start, without_overlap, request
):
    # sp changes no bit except with MLA, whose products then have other row counts.
    is_sequence_parallel = model not in MLAS and "sp" in name
    features = [each for each in name.split("+") if each != "sp"] if is_sequence_parallel else []
    expected = without_overlap(layout, model, *features)
    seed = CASES_SEEDS[request.node.callspec.id]
    with start(layout, model, config, VNPU_RACES="raise", VNPU_SCHEDULE=f"fuzz:{seed}") as engine:
        answers = answers_of(engine)
        decided = engine.on_workers("overlap_decisions")
        used = engine.on_workers("stream_roles")
        said = engine.log_text()
    if "fused" in name:
        is_asked = "moe_communication" in config
        why = "moe_communication asks for it" if is_asked else "ubatches overlap"
        assert f"Mixture of experts: fused, because {why}" in said
    assert ("run sequence parallel on" in said) == runs_sequence_parallel(layout, name)
    if model in IN_16_BITS:
        assert_near(answers, expected)
    else:
        assert tokens_of(answers) == tokens_of(expected)
    if is_sequence_parallel or name in ("attention", "experts", "attention+experts"):
        assert answers == expected, "the arithmetic is unchanged, and the bits are not"
    is_split = "dual" in name or name in SCHEDULES
    assert all(counts.get("split", 0) > 5 for counts in decided) == is_split
    if name != "auto":
        expected_roles = side_streams(layout, model, name, is_split)
        assert [set(roles) for roles in used] == [expected_roles] * len(used)


def runs_sequence_parallel(layout: str, name: str) -> bool:
    """True if an engine must run sequence parallel; DP ranks that share experts must not."""
    return ("sp" in name or name in ("lean", "auto")) and not layout.startswith("dp")


def side_streams(layout: str, model: str, name: str, is_split: bool) -> set[str]:
    """Returns the roles of side streams that an engine must have used."""
    is_mla = model in MLAS
    # In these small steps a rank's shard leaves nothing to run beside attention.
    is_sequence_parallel = runs_sequence_parallel(layout, name)
    roles = {"communication"} if is_split else set()
    if is_mla and ("attention" in name or name in SCHEDULES) and not is_sequence_parallel:
        roles.add("vector")
    if is_mla and ("experts" in name or name in SCHEDULES):
        roles.add("shared expert")
    if is_split and is_sequence_parallel:  # whole steps exchange shards on the main stream
        roles.add("exchange")
    return roles


CASES_SEEDS = {each.id: number for number, each in enumerate(CASES)}


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(1000, 1100))
def test_any_order_gives_the_same_answers(seed: int, start: Start, without_overlap: Expected):
    layout = ("tp2", "ep2", "dp2")[seed % 3]
    config = merged(of("dual", "attention", "experts"), {"dbo": {"norm_vector_cores": 4}})
    with start(layout, MLA, config, VNPU_RACES="raise", VNPU_SCHEDULE=f"fuzz:{seed}") as engine:
        answers = answers_of(engine)
    assert tokens_of(answers) == tokens_of(without_overlap(layout, MLA))
