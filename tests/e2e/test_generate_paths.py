"""Every path through the engine gives transformers' tokens."""

import pytest
from vllm import SamplingParams

from vllm_davinci_testing.engines.fixture_types import Engines, Prompts
from vllm_davinci_testing.engines.preemption import few_blocks
from vllm_davinci_testing.engines.transformers_reference import TransformersReference

pytestmark = pytest.mark.nightly("layouts")

MAX_TOKENS = 64

# The model of all tests that compare paths through the engine.
PATHS_MODEL = "llama_head64_gqa4"


# --- exact tokens ------------------------------------------------------------------------------


def test_tokens_are_the_same_after_preemption(exact_engine: Engines, prompts: Prompts):
    # Requests outgrow their first block at different times, and the cache has half of the needed
    # blocks.
    chosen = [prompt for prompt in prompts if 70 <= len(prompt) <= 127][:12]
    assert len(chosen) == 12
    options = {"enable_prefix_caching": False, **few_blocks(15)}
    with exact_engine(PATHS_MODEL, chosen, MAX_TOKENS, **options) as engine:
        assert engine.metrics()["vllm:num_preemptions"] > 0


def test_the_shipped_checkpoint_completes_python_in_bfloat16(tiny_llama, start_engine):
    prompts = ["def ", "import ", "class ", "if __name__ == "]
    with start_engine(tiny_llama, dtype="bfloat16") as engine:
        sampling = SamplingParams(temperature=0, max_tokens=40, logprobs=0)
        outputs = engine.generate(prompts, sampling)
    assert outputs[3].outputs[0].text.startswith("'__main__':")
    exact = TransformersReference(tiny_llama)
    for output in outputs:
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        prompt = list(output.prompt_token_ids)
        rows = exact.logprobs([*prompt, *tokens])[len(prompt) - 1 : -1]
        expected = [float(row[token]) for row, token in zip(rows, tokens, strict=True)]
        seen = [
            entry[token].logprob for entry, token in zip(completion.logprobs, tokens, strict=True)
        ]
        # bfloat16 keeps 8 bits: logits of about 20 are off by up to 0.1.
        assert seen == pytest.approx(expected, abs=0.25)
