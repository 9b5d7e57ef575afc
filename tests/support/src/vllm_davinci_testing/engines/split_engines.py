"""Engines with split steps, and how they decide."""

import random
from collections import Counter
from typing import Any

from vllm import SamplingParams

from vllm_davinci_testing.engines.engine_process import EngineProcess
from vllm_davinci_testing.engines.split_settings import SPLIT_ALWAYS
from vllm_davinci_testing.engines.zoo_model import NUM_BYTES

MAX_TOKENS = 16
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
FIRST_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=5)


def overlapped(**options: Any) -> dict[str, Any]:
    return {"additional_config": {"dbo": {**SPLIT_ALWAYS, **options}}}


def decisions(engine: EngineProcess) -> Counter[str]:
    """Returns the number of steps by reason; asserts that all ranks decide the same."""
    first, *others = engine.on_workers("overlap_decisions")
    # A pipeline stage warms up on its own.
    assert all({**other, "not_a_step": 0} == {**first, "not_a_step": 0} for other in others)
    return Counter(first)


def random_prompts(seed: int, lengths: list[int]) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(NUM_BYTES) for _ in range(n)] for n in lengths]
