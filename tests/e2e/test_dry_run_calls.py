"""A rank of a dry-run makes the same calls as a rank of an engine."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from vllm_davinci.core.export.exporter import Exporter
from vllm_davinci.vnpu import VirtualDeviceConfig
from vllm_davinci.vnpu.operator_rows import constraints
from vllm_davinci_testing.engines.dp_engines import DPEngines
from vllm_davinci_testing.engines.int8_checkpoint import input_ranges
from vllm_davinci_testing.engines.split_settings import SPLIT_ALWAYS
from vllm_davinci_testing.engines.timeline_worker import TimelineWorker, launched_tasks
from vllm_davinci_testing.processes.forked import run_command

pytestmark = pytest.mark.nightly("planning")

CHIP = "ascend910b2"
LIMIT_S = 300
REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 3, 128, 4
# The tokens choose experts of every rank, as a dry-run assumes.
PROMPT = [(number * 37 + 11) % 250 for number in range(PROMPT_TOKENS)]
EP = {"enable_expert_parallel": True}
SMALL = {
    "dtype": "bfloat16",
    "max_model_len": PROMPT_TOKENS + OUTPUT_TOKENS,
    "max_num_seqs": REQUESTS,
    "max_num_batched_tokens": REQUESTS * PROMPT_TOKENS,
    "kv_cache_memory_bytes": 96 << 20,
}


def case(
    name: str, kind: str, ranks: dict[str, Any], more: dict[str, Any], *, daily: bool = False
) -> Any:
    marks = [] if daily else [pytest.mark.thorough]
    return pytest.param(kind, ranks, more, id=f"{name}-{kind}", marks=marks)


EAGER = {"enforce_eager": True}
GRAPH = {"max_cudagraph_capture_size": 4}
DUAL = {"enforce_eager": True, "additional_config": {"dbo": {**SPLIT_ALWAYS, "split": "token"}}}
TP2, PP2 = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
DP2 = {"data_parallel_size": 2}
DYNAMIC, STATIC = "W8A8_DYNAMIC", "W8A8"
CASES = [
    case("tp1", DYNAMIC, {}, EAGER),
    case("tp1_graph", DYNAMIC, {}, GRAPH),
    case("tp1", "bf16", {}, EAGER),
    case("tp1", STATIC, {}, EAGER),
    case("tp2_ep", DYNAMIC, {**TP2, **EP}, EAGER, daily=True),
    case("tp2_ep_graph", DYNAMIC, {**TP2, **EP}, GRAPH),
    case("tp2_ep_dual", DYNAMIC, {**TP2, **EP}, DUAL),
    case("tp2", "bf16", TP2, EAGER),
    case("tp2_graph", STATIC, TP2, GRAPH),
    case("tp4_ep", DYNAMIC, {"tensor_parallel_size": 4, **EP}, EAGER),
    case("pp2", DYNAMIC, PP2, EAGER),
    case("tp2_pp2", "bf16", {**TP2, **PP2}, EAGER),
    case("dp2_ep", DYNAMIC, {**DP2, **EP}, EAGER),
    case("dp2_ep_graph", DYNAMIC, {**DP2, **EP}, GRAPH),
    case("dp2_ep_dual", "bf16", {**DP2, **EP}, DUAL),
    case("dp2_tp2_ep", DYNAMIC, {**DP2, **TP2, **EP}, EAGER),
    case("dp2_tp2", STATIC, {**DP2, **TP2}, EAGER),
]


@pytest.fixture(scope="module")
def checkpoint(
    tiny_deepseek: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    made = {"bf16": tiny_deepseek}

    def find(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("kinds") / kind
            ranges = {}
            if kind == STATIC:
                ranges = input_ranges(tiny_deepseek, [torch.tensor([PROMPT])])
            Exporter(tiny_deepseek, made[kind], kind, torch.bfloat16, ranges).run(lambda _: None)
        return made[kind]

    return find


def options_of(arguments: dict[str, Any]) -> list[str]:
    """Formats options as arguments of `vllm serve`."""
    found = []
    for name, value in arguments.items():
        option = f"--{name.replace('_', '-')}"
        text = json.dumps(value) if isinstance(value, dict) else value
        found.append(option if value is True else f"{option}={text}")
    return found


@pytest.mark.parametrize(("kind", "ranks", "more"), CASES)
def test_a_rank_has_the_launches_of_an_engine(
    kind, ranks, more, checkpoint, start_engine, tmp_path
):
    timeline = tmp_path / "timeline.json"
    done = run_command(
        "vllm_davinci.meta",
        *("dry-run", f"--model={checkpoint(kind)}", f"--chip={CHIP}", f"--trace={timeline}"),
        *(f"--requests={REQUESTS}", f"--prompt-tokens={PROMPT_TOKENS}"),
        *(f"--output-tokens={OUTPUT_TOKENS}", *options_of({**SMALL, **ranks, **more})),
        limit_s=LIMIT_S,
    )
    assert done.status == 0, done.stderr[-3000:]
    dry = launched_tasks(timeline)

    directory = tmp_path / "timelines"
    directory.mkdir()
    count = ranks.get("data_parallel_size", 1)
    own = {name: value for name, value in ranks.items() if name != "data_parallel_size"}
    if any(name.endswith("_size") for name in own):
        own["distributed_executor_backend"] = "mp"
    virtual = VirtualDeviceConfig(devices=8, chip=CHIP, timeline=str(directory))
    with DPEngines(
        start_engine,
        checkpoint(kind),
        count,
        environment=virtual.environment(),
        worker_extension_cls=f"{TimelineWorker.__module__}.TimelineWorker",
        async_scheduling=False,  # like a dry-run's scheduler, which knows each step's tokens
        **{**SMALL, **own, **more},
    ) as engine:
        engine.on_workers("begin_timeline")
        engine.generate(
            [[number, *PROMPT[1:]] for number in range(REQUESTS * count)],
            SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True),
        )
        launched = engine.on_workers("launched")
    assert len(dry) > 100
    with_rules = {row.operator for row in constraints()}
    assert {name for name in dry if name.startswith("aclnn")} <= with_rules
    # Data-parallel ranks end together: an idle rank runs dummy steps with the others.
    assert launched[0][: len(dry)] == dry
    assert count > 1 or len(launched[0]) == len(dry)
