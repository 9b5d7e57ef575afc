"""Measures one DP rank for overlap.py: an engine prefills batches."""

import random
import time
from typing import Any

from vllm import LLM, SamplingParams


def measure(options: dict[str, Any]) -> list[tuple[float, float]]:
    """Prefills batches; returns begin and end of each in microseconds of the monotonic clock."""
    tokens, requests = options["tokens"], options["requests"]
    engine = LLM(
        options["model"],
        skip_tokenizer_init=True,
        dtype="float32",
        seed=options["seed"],
        max_model_len=tokens + 1,
        max_num_seqs=requests,
        max_num_batched_tokens=tokens * requests,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=256 << 20,
        enforce_eager=True,
        additional_config=options["additional_config"],
        **options["engine"],
    )
    first = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    generator = random.Random(options["seed"])
    batches = []
    for _ in range(options["repetitions"] + 1):
        prompts = [
            {
                "prompt_token_ids": [
                    generator.randrange(options["vocabulary"]) for _ in range(tokens)
                ]
            }
            for _ in range(requests)
        ]
        begin = time.monotonic_ns()
        engine.generate(prompts, first, use_tqdm=False)
        batches.append((begin / 1000, time.monotonic_ns() / 1000))
    decisions = engine.collective_rpc("overlap_decisions")[0]
    assert decisions.get("split", 0) == (len(batches) if decisions else 0), decisions
    return batches[1:]  # the first batch warms up
