"""Generates with an in-process engine: `with_vllms_kernels.py MODEL OPTIONS RESULT`.

The file RESULT gets each request's tokens and probabilities, and each Triton kernel's launches.
"""

import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

PROMPTS = (
    "import os",
    "def first(",
    "class Token:",
    "for line in",
    "return x + ",
    "import os\nimport",
)
PLAIN = SamplingParams(temperature=0.9, top_p=0.95, seed=5, max_tokens=24, logprobs=2)
GREEDY = SamplingParams(temperature=0, max_tokens=24, logprobs=3, prompt_logprobs=2)
REST = (
    SamplingParams(temperature=0.9, min_p=0.01, seed=5, max_tokens=24, logprobs=2),
    SamplingParams(
        temperature=0.7, seed=6, max_tokens=24, repetition_penalty=1.2, presence_penalty=0.4,
        frequency_penalty=0.3, logit_bias={40: 2.0}, min_tokens=9, bad_words=["in"], logprobs=1,
    ),
)  # fmt: skip


def main() -> None:
    model, options, result = sys.argv[1:]
    engine: dict[str, Any] = json.loads(options)
    llm = LLM(
        model,
        max_model_len=256,
        dtype="float32",
        enforce_eager=True,
        worker_extension_cls="vllm_davinci_testing.engines.counting_worker.TritonCountingWorker",
        **engine,
    )
    llm.collective_rpc("count_triton_launches")
    # Speculative decoding refuses the other sampling options.
    drawn = (PLAIN,) if "speculative_config" in engine else (PLAIN, *REST)
    sampling = [(GREEDY, *drawn)[number % (1 + len(drawn))] for number in range(len(PROMPTS))]
    outputs = llm.generate(list(PROMPTS), sampling, use_tqdm=False)
    (launches,) = llm.collective_rpc("triton_launches")
    found = {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "ranked": [list(map(list, output.outputs[0].logprobs)) for output in outputs],
        "logprobs": [
            each.logprob
            for output in outputs
            for place in [*(output.prompt_logprobs or ())[1:], *output.outputs[0].logprobs]
            for each in place.values()
        ],
        "launches": launches,
    }
    Path(result).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
