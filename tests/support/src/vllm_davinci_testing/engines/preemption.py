"""Engines with too few cache blocks, so that requests are preempted."""

from collections.abc import Sequence
from typing import Any

from vllm_davinci_testing.engines.engine_process import EngineProcess
from vllm_davinci_testing.engines.generating import assert_generates
from vllm_davinci_testing.engines.transformers_reference import TransformersReference


def few_blocks(count: int) -> dict[str, Any]:
    """Returns options of an engine that has `count` blocks and counts preemptions."""
    return {
        "num_gpu_blocks_override": count,
        "kv_cache_memory_bytes": None,
        "gpu_memory_utilization": 0.02,
        "disable_log_stats": False,
    }


# Options that let `assert_no_layer_waits` count.
COUNTED = {
    "worker_extension_cls": "vllm_davinci_testing.engines.counting_worker.StepCountingWorker"
}


def assert_no_layer_waits(
    engine: EngineProcess,
    reference: TransformersReference,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
) -> list[Any]:
    """Compares tokens, some of them after a preemption; returns the counts of all steps."""
    engine.on_workers("count_waits_of_steps")
    assert_generates(engine, reference, prompts, max_tokens)
    (steps,) = engine.on_workers("waits_of_steps")
    assert engine.metrics()["vllm:num_preemptions"] > 0
    # The first step creates shared tensors, such as the attention mask.
    waits = [step.in_forward for step in steps[1:]]
    assert waits == [0] * len(waits)
    counted: list[Any] = steps
    return counted
