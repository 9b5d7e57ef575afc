"""Engines with different or changing expert placements, and their answers."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm import SamplingParams

from vllm_davinci_testing.engines import model_zoo
from vllm_davinci_testing.engines.dp_engines import DPEngines
from vllm_davinci_testing.engines.graph_settings import decode_graphs
from vllm_davinci_testing.engines.split_settings import SPLIT_ALWAYS

EXPERTS, V3 = "qwen3_moe_softmax_top2_of_8", "deepseek_v3_moe"
WIDE = "qwen3_moe_hidden1024"  # fused launches need this hidden size, and 16 bits
WORKER = "vllm_davinci_testing.engines.balancing_worker.BalancingWorker"

TP2: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
TP4: dict[str, Any] = {"tensor_parallel_size": 4, "distributed_executor_backend": "mp"}
DP2: dict[str, Any] = {"count": 2}
DP2TP2 = {**DP2, **TP2}
GRAPHS = decode_graphs(2, 4, 8)
BALANCED = {"dynamic_eplb": True, "step_interval": 6, "window_size": 6}
DUAL = {"dbo": {**SPLIT_ALWAYS, "split": "token"}}
ALL_TO_ALL = {"moe_communication": "all_to_all"}
CHIP = {"VNPU_SOC": "Ascend910_9391"}


def started(
    start_engine: Callable[..., Any],
    checkpoint: Path,
    additional: dict[str, Any],
    in_16_bits: bool = False,
    **options: Any,
) -> DPEngines:
    """Starts DP ranks with a model. additional: additional_config"""
    return DPEngines(
        start_engine,
        checkpoint,
        environment={**(CHIP if in_16_bits else {}), **options.pop("environment", {})},
        additional_config=additional,
        dtype="bfloat16" if in_16_bits else "float32",
        enable_expert_parallel=True,
        max_num_batched_tokens=224,
        max_num_seqs=8,
        max_logprobs=2,
        enable_prefix_caching=False,
        worker_cls=WORKER,
        **options,
    )


def skewed(seed: int, num_prompts: int) -> list[list[int]]:
    """Makes prompts of few distinct tokens, which the router sends to few experts."""
    generator = random.Random(seed)
    few = [generator.randrange(model_zoo.NUM_BYTES) for _ in range(2)]
    return [
        [generator.choice(few) for _ in range(generator.randint(20, 100))]
        for _ in range(num_prompts)
    ]


def answers(engine: DPEngines) -> list[Any]:
    """Returns tokens with logprobs, for prompts after which the experts have moved."""
    found = []
    for seed in (1, 2):
        outputs = engine.generate(
            skewed(seed, 6),
            SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=2),
        )
        found += [
            [
                (token, {each: entry.logprob for each, entry in step.items()})
                for token, step in zip(
                    output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True
                )
            ]
            for output in outputs
        ]
    return found


Slots = list[list[list[tuple[int, str]]]]  # by rank, layer, slot: expert and checksum


def experts_of(slots: Slots) -> dict[tuple[int, int], str]:
    """Returns the checksum of each layer's experts; asserts that all slots of an expert are
    equal.
    """
    found: dict[tuple[int, int], str] = {}
    for of_rank in slots:
        for layer, of_layer in enumerate(of_rank):
            for expert, digest in of_layer:
                assert found.setdefault((layer, expert), digest) == digest, (layer, expert)
    return found
