"""DeepSeek-V4's attention over compressed rows: transformers' tokens on every path of a step."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from vllm_davinci_testing.engines.compressed_zoo import NUM_CHOSEN, WINDOW
from vllm_davinci_testing.engines.engine_process import EngineError, EngineProcess
from vllm_davinci_testing.engines.generating import (
    COUNTED,
    IN_PARTS,
    RACES,
    TWO_RANKS,
    assert_generates,
)
from vllm_davinci_testing.engines.transformers_reference import TransformersReference

MODEL, MAX_TOKENS = "deepseek_v4", 12
LONG = {"max_model_len": 320}
# Around the edges of groups of 4 and 128, of the window, and of what an indexer chooses.
LENGTHS = [
    *(1, 3, 4, 5),
    *(WINDOW - 1, WINDOW, WINDOW + 1),
    *(4 * NUM_CHOSEN, 4 * NUM_CHOSEN + 5),
    *(127, 128, 129, 128 * 2 + 3),
]


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(256) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(IN_PARTS, id="in_parts", marks=pytest.mark.nightly("layouts")),
        *(
            pytest.param(options, id=name, marks=pytest.mark.thorough)
            for name, options in {
                "whole": {},
                "synchronous": {"async_scheduling": False},
                "tensor2_in_parts": {**TWO_RANKS, **IN_PARTS},
                "tensor4": {**TWO_RANKS, "tensor_parallel_size": 4},
                "expert2": {**TWO_RANKS, "enable_expert_parallel": True},
            }.items()
        ),
    ],
)
def test_tokens_are_those_of_transformers_in_any_order_that_events_allow(
    options: dict[str, Any],
    zoo: Callable[[str], Path],
    reference: Callable[[str], TransformersReference],
    start_engine: Callable[..., EngineProcess],
):
    environment = {**RACES, "VNPU_SCHEDULE": "fuzz:3"}
    with start_engine(zoo(MODEL), environment=environment, **LONG, **options) as engine:
        assert_generates(engine, reference(MODEL), prompts_of(LENGTHS), MAX_TOKENS)


@pytest.mark.thorough
def test_preempted_and_cached_prompts_give_the_same_tokens_and_no_layer_waits(
    zoo: Callable[[str], Path],
    reference: Callable[[str], TransformersReference],
    start_engine: Callable[..., EngineProcess],
):
    common = prompts_of([256], seed=1)[0]
    sharing = [[*common, *more] for more in prompts_of([1, 30, 7], seed=2)]
    with start_engine(
        zoo(MODEL),
        environment=RACES,
        num_gpu_blocks_override=100,
        kv_cache_memory_bytes=None,
        gpu_memory_utilization=0.02,
        disable_log_stats=False,
        worker_extension_cls=COUNTED,
        max_num_batched_tokens=64,
        max_num_seqs=16,
        **LONG,
    ) as engine:
        engine.on_workers("count_waits_of_steps")
        assert_generates(engine, reference(MODEL), prompts_of([100] * 8, seed=3), MAX_TOKENS)
        (steps,) = engine.on_workers("waits_of_steps")
        preemptions = engine.metrics()["vllm:num_preemptions"]
        hits = engine.metrics()["vllm:prefix_cache_hits"]
        for each in sharing:
            assert_generates(engine, reference(MODEL), [each], MAX_TOKENS)
        hits = engine.metrics()["vllm:prefix_cache_hits"] - hits
    assert preemptions > 0
    waits = [step.in_forward for step in steps[1:]]
    assert waits == [0] * len(waits)
    # Two blocks of 128 tokens each time, of which the second is found where more follows it.
    assert hits >= 128 * (len(sharing) - 1)


@pytest.mark.thorough
def test_logprobs_in_16_bits_on_a_chip_stay_close(
    zoo: Callable[[str], Path],
    reference: Callable[[str], TransformersReference],
    start_engine: Callable[..., EngineProcess],
):
    """As close to fp32 as transformers' own model in bfloat16."""
    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    prompts = prompts_of(LENGTHS)
    environment = {**RACES, "VNPU_SOC": "Ascend910B3"}
    with start_engine(zoo(MODEL), environment=environment, dtype="bfloat16", **LONG) as engine:
        outputs = engine.generate([{"prompt_token_ids": each} for each in prompts], greedy)
    tokens = [list(each.outputs[0].token_ids) for each in outputs]
    in_16_bits = [_in_16_bits(zoo(MODEL)).greedy(each, MAX_TOKENS) for each in prompts]
    ours = sum(reference(MODEL).differing_tokens(prompts, tokens))
    assert ours <= 1.5 * sum(reference(MODEL).differing_tokens(prompts, in_16_bits))


def _in_16_bits(checkpoint: Path) -> TransformersReference:
    import torch

    return TransformersReference(checkpoint, torch.bfloat16)


@pytest.mark.thorough
def test_ranks_that_do_not_divide_the_groups_of_heads_are_refused_by_name(
    zoo: Callable[[str], Path], start_engine: Callable[..., EngineProcess]
):
    with pytest.raises(EngineError, match="--tensor-parallel-size 8 does not divide the 4 groups"):
        start_engine(zoo(MODEL), **TWO_RANKS | {"tensor_parallel_size": 8}, **LONG)
