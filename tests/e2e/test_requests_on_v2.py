"""Requests ask vLLM's V2 runner for what V1 does not give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from vllm import SamplingParams

from vllm_davinci_testing.engines.engine_process import EngineProcess

MODEL = "llama_head64_gqa4"
ON_V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1", "VNPU_RACES": "raise"}


@pytest.mark.thorough
def test_a_sampled_token_comes_with_the_tokens_that_were_allowed(
    zoo: Callable[[str], Path], start_engine: Callable[..., EngineProcess]
):
    with start_engine(
        zoo(MODEL),
        environment=ON_V2,
        return_sampling_mask=True,
        logprobs_mode="processed_logprobs",
    ) as engine:
        kinds = [
            SamplingParams(
                temperature=1.0, top_k=k, top_p=p, max_tokens=6, ignore_eos=True, logprobs=0
            )
            for k, p in ((1, 1.0), (5, 1.0), (40, 0.5), (200, 1.0))
        ]
        outputs = engine.generate([{"prompt_token_ids": [1, 2, 3]}] * 4, kinds)
    for output, kind in zip(outputs, kinds, strict=True):
        (completion,) = output.outputs
        masks = completion.sampling_mask.token_ids
        assert len(masks) == 6
        for token, mask, logprobs in zip(
            completion.token_ids, masks, completion.logprobs, strict=True
        ):
            assert token in mask and logprobs[token].logprob <= 0
            assert len(set(mask)) == len(mask)
            assert len(mask) == kind.top_k if kind.top_p == 1 else 0 < len(mask) <= kind.top_k
