"""The requests with which engines are compared that speculate and do not, and what those tell."""

from __future__ import annotations

from typing import Any

from vllm import SamplingParams

from vllm_davinci_testing.engines.engine_process import EngineProcess

REQUESTS = 12
RACES = {"VNPU_RACES": "raise", "VNPU_SCHEDULE": "fuzz:7"}
SMALL = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "disable_log_stats": False}


def texts() -> list[dict[str, Any]]:
    """Prompts of 1 to 140 tokens, some of which repeat themselves."""
    lengths = [1, 2, 127, 128, 129, 140, *range(10, 10 + REQUESTS - 6)]
    return [
        {"prompt_token_ids": [3 + (token * (7 + number)) % (20 + number) for token in range(n)]}
        for number, n in enumerate(lengths)
    ]


def generate(engine: EngineProcess, **options: Any) -> list[list[int]]:
    """Tokens of requests that end at different times."""
    parameters = [
        SamplingParams(
            **{"temperature": 0, "max_tokens": 24 + 5 * (n % 5), "ignore_eos": True} | options
        )
        for n in range(REQUESTS)
    ]
    outputs = engine.generate(texts(), parameters)
    return [list(output.outputs[0].token_ids) for output in outputs]


def told(engine: EngineProcess) -> tuple[int, int]:
    """Draft tokens so far, and how many of them were accepted."""
    metrics = engine.metrics()
    return (
        int(metrics["vllm:spec_decode_num_draft_tokens"]),
        int(metrics["vllm:spec_decode_num_accepted_tokens"]),
    )


def speculation(method: str, count: int, **options: Any) -> dict[str, Any]:
    """Arguments of an engine that speculates."""
    return {
        "speculative_config": {"method": method, "num_speculative_tokens": count, **options},
        **SMALL,
    }
