"""`vllm-davinci compare MODEL`: compares vLLM's greedy tokens with those of transformers on the
CPU.

MODEL is a checkpoint directory or a GGUF file. In float32 (on the virtual NPU) all tokens should be
equal. In 16 bits a token may differ where the reference's two best logits are close: the margin of
each first difference is printed. Options of `vllm serve` follow `--`: steps run one by one unless
`--no-enforce-eager` is among them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from rich.console import Console

from vllm_davinci.meta import local_engine
from vllm_davinci.meta.errors import MetaError
from vllm_davinci.meta.generate import encoded

if TYPE_CHECKING:
    from torch import Tensor

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea,",
    "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self, path):\n",
    "Water boils at a temperature of",
    "1, 1, 2, 3, 5, 8,",
    "Question: How many legs does a spider have?\nAnswer:",
    "The quick brown fox jumps over the lazy dog. " * 24,  # longer than a block of the cache
)
QUESTIONS = (
    "What is the capital of {}?",
    "Write two sentences about {}.",
    "Explain {} to a child.",
    "Give three reasons to visit {}.",
    "How would a poet describe {}?",
)
TOPICS = ("France", "Norway", "the sea", "a library", "Mars", "Kyoto", "a market", "the Nile")
FACTS = (
    "The train to {} leaves at {} minutes past the hour.",
    "A visitor to {} paid {} coins for a lamp.",
    "About {1} people once walked to {0} in the snow.",
    "In {} it has rained on {} days of this year.",
)
LONGEST_SENTENCES = 120  # 2000 tokens of SmolLM2's tokenizer
# Logits closer than this are a tie that rounding decides, by the engine's dtype. float32: 1e-4
# standard deviations, as tests/support derives; 16 bits: the largest margin of 40 prompts of a
# model of 135 M parameters was 0.45.
TIES = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}


@dataclass(frozen=True)
class Difference:
    """The first token of a continuation that differs from the reference's choice.

    position: index in the continuation, from 0
    token:    vLLM's; expected: the reference's
    margin:   the reference's logit of `expected` minus that of `token`
    """

    prompt: int
    position: int
    token: int
    expected: int
    margin: float


@dataclass(frozen=True)
class Comparison:
    """equal_prompts: number of prompts with all tokens equal; tokens: number compared; differences:
    the first of each prompt
    """

    prompts: int
    equal_prompts: int
    tokens: int
    equal_tokens: int
    differences: list[Difference]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    local_engine.add_model_arguments(parser, max_tokens=32)
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help=f"a UTF-8 file with a prompt per line (default: {len(PROMPTS)} built-in ones)",
    )
    prompts.add_argument(
        "--composed",
        type=int,
        metavar="N",
        help="N questions, three of four after up to 2000 tokens of random facts; always the same",
    )
    parser.add_argument("--chat", action="store_true", help="format prompts as users' messages")
    parser.add_argument(
        "--tie",
        type=float,
        metavar="X",
        help=f"a difference of two logits at most X apart is a tie (default: {TIES})",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace, engine_arguments: list[str]) -> int:
    """Exit status 0 if all tokens are equal, ties excepted; 1 otherwise, with the reason."""
    console = Console(stderr=True)
    try:
        texts = _texts(options.prompts) if options.composed is None else composed(options.composed)
        engine = local_engine.LocalEngine(options, engine_arguments, console)
        prompts = [encoded(engine.tokenizer, text, options.chat) for text in texts]
        llm = engine.start(prompts, engine.parameters_bytes("float32"))
        outputs = local_engine.greedy(llm, prompts, options.max_tokens)
        replays = local_engine.graph_replays(llm)
    except (MetaError, argparse.ArgumentError, OSError, RuntimeError, ValueError) as error:
        problem = local_engine.start_problem(error)
        console.print(f"vllm-davinci compare: {problem}", markup=False, soft_wrap=True)
        return 1
    del llm  # frees its memory before the reference is loaded
    console.print("transformers computes the same on the CPU, in float32", highlight=False)
    found = compared(_reference(engine.directory), prompts, outputs)
    tie = TIES[engine.dtype] if options.tie is None else options.tie
    wrong = [each for each in found.differences if each.margin > tie]
    if options.json:
        more = {"dtype": engine.dtype, "tie": tie, "graph_replays": replays}
        print(json.dumps({**asdict(found), **more}))
    else:
        _print(found, engine.tokenizer, texts, tie)
        if replays:
            print(f"{replays} steps replayed a captured graph")
    return 1 if wrong else 0


def _texts(path: Path | None) -> list[str]:
    if path is None:
        return list(PROMPTS)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise MetaError(f"--prompts: {error}. Name a UTF-8 text file.") from error
    found = [line for line in lines if line.strip()]
    if not found:
        raise MetaError(f"--prompts: {path} holds no prompt. Write one per line.")
    return found


def composed(count: int) -> list[str]:
    """Makes questions, three of four after random facts: mostly few facts, at most
    LONGEST_SENTENCES.
    """
    random = Random(0)
    texts = []
    for number in range(count):
        length = round(LONGEST_SENTENCES ** random.random()) if number % 4 else 0
        facts = (
            random.choice(FACTS).format(random.choice(TOPICS), random.randrange(2, 60))
            for _ in range(length)
        )
        question = random.choice(QUESTIONS).format(random.choice(TOPICS))
        texts.append(" ".join([*facts, question]))
    return texts


def _reference(directory: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def compared(
    reference: Any, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
) -> Comparison:
    """Compares continuations with the reference's choice after the same tokens.

    One pass over prompt and continuation gives the choice at every position, so tokens after a
    difference are compared too.
    """
    equal_prompts = tokens = equal_tokens = 0
    differences = []
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        rows = _logits(reference, [*prompt, *output])[len(prompt) - 1 : -1]
        chosen = rows.argmax(dim=1).tolist()
        tokens += len(output)
        matches = [ours == theirs for ours, theirs in zip(output, chosen, strict=True)]
        equal_tokens += sum(matches)
        if all(matches):
            equal_prompts += 1
            continue
        at = matches.index(False)
        margin = float(rows[at, chosen[at]] - rows[at, output[at]])
        differences.append(Difference(number, at, output[at], chosen[at], margin))
    return Comparison(len(prompts), equal_prompts, tokens, equal_tokens, differences)


def _logits(reference: Any, tokens: Sequence[int]) -> Tensor:
    """[len(tokens), vocabulary] in fp32: row i predicts token i + 1."""
    import torch

    with torch.inference_mode():
        logits: Tensor = reference(torch.tensor([list(tokens)])).logits[0].float()
    return logits


def _print(found: Comparison, tokenizer: Any, texts: Sequence[str], tie: float) -> None:
    for each in found.differences:
        verdict = "a tie" if each.margin <= tie else "DIFFERENT"
        ours, theirs = (tokenizer.decode([token]) for token in (each.token, each.expected))
        print(
            f"prompt {each.prompt} {texts[each.prompt][:32]!r}: token {each.position} is {ours!r}, "
            f"transformers has {theirs!r}, {each.margin:.2g} above it in logits: {verdict}"
        )
    print(
        f"{found.equal_prompts} of {found.prompts} prompts equal, {found.equal_tokens} of "
        f"{found.tokens} tokens"
    )
