"""An engine's log-likelihood of a text."""

import math

from vllm import SamplingParams

from vllm_davinci_testing.engines.engine_process import EngineProcess

# Tolerance for the mean log-likelihood of a short text. The perplexity may change by this factor;
# benchmarks/quantization/perplexity.py has figures for long texts.
CLOSE = 0.05


def likelihood(engine: EngineProcess, text: list[int]) -> float:
    """Returns the mean log-likelihood per token; also generates, so that decodes run."""
    (output,) = engine.generate(
        [{"prompt_token_ids": text}],
        SamplingParams(max_tokens=16, temperature=0, prompt_logprobs=0, ignore_eos=True),
    )
    assert len(output.outputs[0].token_ids) == 16
    found = [
        candidates[token].logprob
        for token, candidates in zip(text[1:], output.prompt_logprobs[1:], strict=True)
    ]
    assert all(map(math.isfinite, found))
    return sum(found) / len(found)
