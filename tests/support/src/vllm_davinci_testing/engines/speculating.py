"""Requests that compare engines with and without speculation, and their results."""

import json
import math
from pathlib import Path
from typing import Any

from vllm import SamplingParams

from vllm_davinci_testing.engines.engine_process import EngineProcess

REQUESTS = 12
RACES = {"VNPU_RACES": "raise", "VNPU_SCHEDULE": "fuzz:7"}
SMALL = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "disable_log_stats": False}


def texts() -> list[dict[str, Any]]:
    """Returns prompts of 1 to 140 tokens; some repeat themselves."""
    lengths = [1, 2, 127, 128, 129, 140, *range(10, 10 + REQUESTS - 6)]
    return [
        {"prompt_token_ids": [3 + (token * (7 + number)) % (20 + number) for token in range(n)]}
        for number, n in enumerate(lengths)
    ]


def write_texts(path: Path, tokens: list[list[int]]) -> Path:
    """Writes the requests followed by these tokens, for a drafter that knows them."""
    pairs = zip(texts(), tokens, strict=True)
    path.write_text(json.dumps([text["prompt_token_ids"] + after for text, after in pairs]))
    return path


def greedy(number: int, **options: Any) -> SamplingParams:
    """Returns parameters of one request; requests end at different times."""
    return SamplingParams(
        **{"temperature": 0, "max_tokens": 24 + 5 * (number % 5), "ignore_eos": True} | options
    )


def generate(
    engine: EngineProcess, adapters: list[Any] | None = None, **options: Any
) -> list[list[int]]:
    """Returns the tokens of all requests. adapters: a LoRARequest or None for each"""
    parameters = [greedy(n, **options) for n in range(REQUESTS)]
    given = {} if adapters is None else {"lora_request": adapters}
    outputs = engine.generate(texts(), parameters, **given)
    return [list(output.outputs[0].token_ids) for output in outputs]


# Difference of two tokens' logprobs within which 16 bits may choose either: a logit of 16 to 32 has
# steps of 1/8 in bfloat16, and several rows of a request are summed in another order than one row.
CLOSE = 0.25


def with_logprobs(engine: EngineProcess) -> list[Any]:
    """Returns the requests' completions, with the likeliest tokens' logprobs at each position."""
    outputs = engine.generate(texts(), [greedy(n, logprobs=5) for n in range(REQUESTS)])
    return [output.outputs[0] for output in outputs]


def first_wrong(expected: list[Any], found: list[list[int]]) -> list[tuple[int, int, float]]:
    """Returns (text, position, distance) of texts that diverge for another reason than rounding.

    expected: completions of `with_logprobs`; texts may diverge after a close choice
    """
    wrong = []
    for number, (completion, tokens) in enumerate(zip(expected, found, strict=True)):
        pairs = enumerate(zip(completion.token_ids, tokens, strict=True))
        place = next((place for place, (one, other) in pairs if one != other), None)
        if place is None:
            continue
        likeliest = completion.logprobs[place]
        chosen = likeliest[completion.token_ids[place]].logprob
        other = likeliest.get(tokens[place])
        distance = math.inf if other is None else chosen - other.logprob
        if distance > CLOSE:
            wrong.append((number, place, distance))
    return wrong


def told(engine: EngineProcess) -> tuple[int, int]:
    """Returns the numbers of drafted and accepted tokens so far."""
    metrics = engine.metrics()
    return (
        int(metrics["vllm:spec_decode_num_draft_tokens"]),
        int(metrics["vllm:spec_decode_num_accepted_tokens"]),
    )


def speculation(method: str, count: int, **options: Any) -> dict[str, Any]:
    """Returns arguments of an engine that speculates."""
    return {
        "speculative_config": {"method": method, "num_speculative_tokens": count, **options},
        **SMALL,
    }
