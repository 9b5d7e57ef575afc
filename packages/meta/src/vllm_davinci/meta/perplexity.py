"""`vllm-davinci perplexity MODEL TEXT ...`: measures how well a checkpoint predicts text.

The engine scores the text itself (vLLM's prompt logprobs), with the options of `vllm serve` that
follow `--`, so it measures what users get: with the checkpoint's types, on several ranks, with
overlap.
"""

import argparse
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rich.console import Console

from vllm_davinci.meta import core_access, local_engine
from vllm_davinci.meta.given_arguments import problem_of_engine


class Score(NamedTuple):
    """perplexity: exp of the mean negative log-likelihood per token; tokens: number scored"""

    perplexity: float
    tokens: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.usage = "%(prog)s MODEL TEXT ... [options] [-- OPTIONS OF VLLM SERVE]"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", help="a checkpoint's directory, or its name on the hub")
    parser.add_argument(
        "text", type=Path, nargs="+", help="UTF-8 files that the model was not trained on"
    )
    parser.add_argument(
        "--window",
        type=int,
        default=512,
        metavar="N",
        help="tokens per scored window (default: %(default)s)",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help="maximum of scored tokens, taken evenly from the start of each file (default: all)",
    )
    parser.add_argument(
        "--at-most", type=float, metavar="P", help="exit with status 1 if the perplexity is higher"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace, engine_arguments: list[str]) -> int:
    """Exit status 0 if the perplexity is at most --at-most; 1 otherwise, 2 for bad options.

    engine_arguments: options of `vllm serve`
    """
    console = Console(stderr=True)

    def tell(problem: object) -> None:
        console.print(f"vllm-davinci perplexity: {problem}", markup=False, soft_wrap=True)

    if options.window < 2 or (options.tokens is not None and options.tokens < 1):
        tell("--window must be at least 2, and --tokens at least 1")
        return 2
    try:
        texts = [path.read_text(encoding="utf-8") for path in options.text]
    except (OSError, UnicodeDecodeError) as error:
        tell(f"{error}. Name UTF-8 text files.")
        return 2
    if (problem := problem_of_engine(options.model, engine_arguments)) is not None:
        tell(problem)
        return 1
    # Only the answer goes to stdout, where vLLM's processes would write too.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    core_access.prepare()
    try:
        # Prompts are a window and one token long. Scoring one needs all of its logits at once, so
        # few requests run at a time.
        length = f"--max-model-len={options.window + 2}"
        ours = [length, "--max-num-seqs=8", "--no-enable-prefix-caching"]
        llm = local_engine.offline_engine(options.model, [*ours, *engine_arguments])
    except (argparse.ArgumentError, OSError, RuntimeError, ValueError) as error:
        tell(local_engine.start_problem(error))
        return 1
    windows = windows_of(llm.get_tokenizer(), texts, options.window, options.tokens)
    if not windows:
        tell("the texts hold no token")
        return 2
    found = score(llm, windows)
    del llm  # ends its processes before the answer is printed
    if options.json:
        print(json.dumps(found._asdict()))
    else:
        print(f"{options.model}: perplexity {found.perplexity:.3f} over {found.tokens} tokens")
    if options.at_most is not None and not found.perplexity <= options.at_most:
        tell(f"{found.perplexity:.3f} is above {options.at_most}")
        return 1
    return 0


def windows_of(
    tokenizer: Any, texts: Sequence[str], window: int, tokens: int | None = None
) -> list[list[int]]:
    """Prompts of at most `window` tokens, each after the model's first token, if it has one.

    tokens: maximum in all, taken evenly from the start of every text
    """
    first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    share = None if tokens is None else max(1, tokens // len(texts))
    found = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:share]
        found += [[*first, *ids[start : start + window]] for start in range(0, len(ids), window)]
    return [prompt for prompt in found if len(prompt) > 1]


class Generates(Protocol):
    """The part of vLLM's LLM that scoring needs."""

    def generate(self, *args: Any, **kwargs: Any) -> list[Any]: ...


def score(llm: Generates, windows: Sequence[Sequence[int]]) -> Score:
    """Scores each window separately; its first token is not scored."""
    from vllm import SamplingParams

    outputs = llm.generate(
        [{"prompt_token_ids": list(window)} for window in windows],
        SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False),
        use_tqdm=False,
    )
    total, count = 0.0, 0
    for output in outputs:
        assert output.prompt_token_ids is not None and output.prompt_logprobs is not None
        pairs = list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))[1:]
        for token, candidates in pairs:
            assert candidates is not None
            total -= candidates[token].logprob
        count += len(pairs)
    return Score(math.exp(total / count), count)
