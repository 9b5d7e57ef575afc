"""Recurrent models in 16 bits are as close to fp32 as transformers in 16 bits.

Rounding changes more than in attention models, because a norm scales up a state's small output. The
limit is transformers' own error with the same weights. The chip accepts only documented calls.
"""

from typing import Any

import pytest
import torch
from vllm import SamplingParams

from vllm_davinci_testing.engines.transformers_reference import TransformersReference

pytestmark = pytest.mark.nightly("layouts")

THOROUGH = pytest.mark.thorough
A2 = "Ascend910B3"
MAX_TOKENS = 24
LOGPROBS = SamplingParams(
    temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, prompt_logprobs=-1, logprobs=-1
)
# Upper limit relative to transformers' own error. Largest measured: 1.02, in decodes where one
# different expert dominates.
FACTOR = 1.15
Rows = list[torch.Tensor]


def root_mean_square(rows: Rows) -> float:
    return float(torch.cat(rows).square().mean().sqrt())


def rows_of(logprobs: list[dict[int, Any]], vocabulary: int) -> torch.Tensor:
    """Converts vLLM's dictionaries of logprobs to [rows, vocabulary]."""
    values = [[each[token].logprob for token in range(vocabulary)] for each in logprobs]
    return torch.tensor(values).view(-1, vocabulary)


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_5_dense",
        pytest.param("qwen3_next_moe", marks=THOROUGH),
        pytest.param("nemotron_h", marks=THOROUGH),
        pytest.param("granite_hybrid_moe", marks=THOROUGH),
    ],
)
def test_logprobs_are_as_close_to_fp32_as_transformers_in_16_bits(name, zoo, start_engine, prompts):
    chosen = prompts[:16]
    with start_engine(
        zoo(name),
        environment={"VNPU_SOC": A2},
        dtype="bfloat16",
        max_logprobs=-1,
        enforce_eager=False,
    ) as engine:
        outputs = engine.generate([{"prompt_token_ids": each} for each in chosen], LOGPROBS)
    exact, rounded = (TransformersReference(zoo(name), d) for d in (torch.float32, torch.bfloat16))
    own: dict[str, Rows] = {"prompts": [], "decodes": []}
    theirs: dict[str, Rows] = {"prompts": [], "decodes": []}
    for prompt, output in zip(chosen, outputs, strict=True):
        text = [*prompt, *output.outputs[0].token_ids]
        expected, other = exact.logprobs(text), rounded.logprobs(text)
        size, begin = expected.shape[-1], len(prompt) - 1
        parts = {
            "prompts": (slice(0, begin), output.prompt_logprobs[1:]),
            "decodes": (slice(begin, begin + MAX_TOKENS), output.outputs[0].logprobs),
        }
        for part, (rows, found) in parts.items():
            own[part].append(rows_of(found, size) - expected[rows])
            theirs[part].append(other[rows] - expected[rows])
    distances = {
        part: (root_mean_square(rows), root_mean_square(theirs[part])) for part, rows in own.items()
    }
    print(name, distances)
    for found, allowed in distances.values():
        assert 0 < found < FACTOR * allowed, distances
