"""An engine's greedy tokens, held against transformers'."""

from __future__ import annotations

from collections.abc import Sequence

from vllm import SamplingParams

from vllm_davinci_testing.engines.engine_process import EngineProcess
from vllm_davinci_testing.engines.transformers_reference import TransformersReference, assert_greedy

RACES = {"VNPU_RACES": "raise"}
COUNTED = "vllm_davinci_testing.engines.counting_worker.StepCountingWorker"
TWO_RANKS = {"distributed_executor_backend": "mp", "tensor_parallel_size": 2}
# Prompts in parts of any length, decodes beside them, in graphs where all decode.
IN_PARTS = {
    "enforce_eager": False,
    "async_scheduling": True,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 16,
}


def assert_generates(
    engine: EngineProcess,
    reference: TransformersReference,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
) -> None:
    """The engine continues all prompts as transformers does."""
    greedy = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    outputs = engine.generate([{"prompt_token_ids": list(each)} for each in prompts], greedy)
    assert_greedy(reference, prompts, outputs, max_tokens)
