"""Scores windows of tokens with one model: `scoring_process.py MODEL WINDOWS.json RESULT.json`.

exp of the mean negative log-likelihood per token; a window's first token is not predicted.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

from vllm import LLM, SamplingParams


def main(model: str, windows_file: Path, result_file: Path) -> None:
    windows = json.loads(windows_file.read_text(encoding="utf-8"))
    longest = max(map(len, windows))
    llm = LLM(
        model,
        dtype="bfloat16",
        max_model_len=longest + 1,
        max_num_seqs=8,
        max_num_batched_tokens=max(2048, longest + 1),
        kv_cache_memory_bytes=128 << 20,
        enforce_eager=True,
        seed=0,
    )
    outputs = llm.generate(
        [{"prompt_token_ids": window} for window in windows],
        SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False),
    )
    total, count = 0.0, 0
    for output in outputs:
        predicted = list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))[1:]
        total -= sum(candidates[token].logprob for token, candidates in predicted)
        count += len(predicted)
    figures = {"perplexity": math.exp(total / count), "tokens": count}
    result_file.write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
