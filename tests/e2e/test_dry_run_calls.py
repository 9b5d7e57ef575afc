"""A rank of a dry-run is given what a rank of an engine is given, call by call."""

from __future__ import annotations

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
from vllm_davinci_testing.engines.timeline_worker import TimelineWorker, launched_tasks
from vllm_davinci_testing.processes.forked import run_command

CHIP = "ascend910b2"
LIMIT_S = 300
REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 3, 128, 4
PROMPT = [100] * PROMPT_TOKENS  # the tokens of a dry-run's prompts
# Operators of a step that take any call here, because no document's rules are written down.
WITHOUT_RULES = {"aclnnGeScalar", "aclnnInplaceCopy", "aclnnInplaceLogicalOr"}
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
TP2 = {"tensor_parallel_size": 2}
CASES = [
    case("tp1", "W8A8_DYNAMIC", {}, EAGER),
    case("tp2", "W8A8_DYNAMIC", {**TP2, **EP}, EAGER, daily=True),
]


@pytest.fixture(scope="module")
def checkpoint(
    tiny_deepseek: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    made = {"bf16": tiny_deepseek}

    def find(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("kinds") / kind
            Exporter(tiny_deepseek, made[kind], kind, torch.bfloat16, {}).run(lambda _: None)
        return made[kind]

    return find


def options_of(arguments: dict[str, Any]) -> list[str]:
    """As `vllm serve` takes them."""
    found = []
    for name, value in arguments.items():
        option = f"--{name.replace('_', '-')}"
        text = json.dumps(value) if isinstance(value, dict) else value
        found.append(option if value is True else f"{option}={text}")
    return found


@pytest.mark.parametrize(("kind", "ranks", "more"), CASES)
def test_a_rank_launches_what_an_engine_launches(
    kind: str,
    ranks: dict[str, Any],
    more: dict[str, Any],
    checkpoint: Callable[[str], Path],
    start_engine: Callable[..., Any],
    tmp_path: Path,
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
    own = {**ranks, **({"distributed_executor_backend": "mp"} if ranks else {})}
    virtual = VirtualDeviceConfig(devices=8, chip=CHIP, timeline=str(directory))
    with start_engine(
        checkpoint(kind),
        environment=virtual.environment(),
        worker_extension_cls=f"{TimelineWorker.__module__}.TimelineWorker",
        async_scheduling=False,  # as a dry-run's scheduler, which knows each step's tokens
        **{**SMALL, **own, **more},
    ) as engine:
        engine.on_workers("begin_timeline")
        engine.generate(
            [{"prompt_token_ids": PROMPT}] * REQUESTS,
            SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True),
        )
        launched = engine.on_workers("launched")
    assert len(dry) > 100
    with_rules = {row.operator for row in constraints()}
    assert {name for name in dry if name.startswith("aclnn")} - with_rules <= WITHOUT_RULES
    assert launched[0] == dry
