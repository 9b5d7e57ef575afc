"""`vllm-davinci generate MODEL --prompt TEXT`: completes prompts with a model on your disk.

MODEL is a Hugging Face checkpoint's directory or a GGUF file. Before the engine starts, the command
prints how long it will take and how much memory it needs. Options of `vllm serve` follow `--`.
"""

import argparse
import time

from rich.console import Console

from vllm_davinci.meta import local_engine
from vllm_davinci.meta.errors import MetaError

PROMPTS = ("The capital of France is", "def fibonacci(n):")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    local_engine.add_model_arguments(parser, max_tokens=32)
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help=f"a text to complete; may be repeated (default: {PROMPTS})",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="each prompt is a user's message, formatted by the model's chat template",
    )


def run(options: argparse.Namespace, engine_arguments: list[str]) -> int:
    """Exit status 0 with text for every prompt; otherwise 1, with the reason in one line."""
    console = Console(stderr=True)
    texts = options.prompt or list(PROMPTS)
    try:
        engine = local_engine.LocalEngine(options, engine_arguments, console)
        prompts = [encoded(engine.tokenizer, each, options.chat) for each in texts]
        began_s = time.monotonic()
        llm = engine.start(prompts)
        started_s = time.monotonic()
        outputs = local_engine.greedy(llm, prompts, options.max_tokens)
        ended_s = time.monotonic()
    except (MetaError, argparse.ArgumentError, OSError, RuntimeError, ValueError) as error:
        problem = local_engine.start_problem(error)
        console.print(f"vllm-davinci generate: {problem}", markup=False, soft_wrap=True)
        return 1
    del llm
    for text, tokens in zip(texts, outputs, strict=True):
        print(f"--- {text!r}\n{engine.tokenizer.decode(tokens, skip_special_tokens=True)}\n")
    count = sum(map(len, outputs))
    console.print(
        f"measured: {started_s - began_s:.0f} s to start, {count} tokens in "
        f"{ended_s - started_s:.1f} s",
        highlight=False,
    )
    return 0


def encoded(tokenizer: object, text: str, chat: bool) -> list[int]:
    """Token ids of a prompt. Raises MetaError for `chat` if the model has no chat template."""
    if not chat:
        ids: list[int] = tokenizer(text)["input_ids"]  # type: ignore[operator]
        if not ids:
            raise MetaError(f"the prompt {text!r} holds no token: give it some text")
        return ids
    if getattr(tokenizer, "chat_template", None) is None:
        raise MetaError("--chat: this model has no chat template. Leave the option out.")
    message = [{"role": "user", "content": text}]
    formatted = tokenizer.apply_chat_template(  # type: ignore[attr-defined]
        message, add_generation_prompt=True, tokenize=False
    )
    chat_ids: list[int] = tokenizer(formatted, add_special_tokens=False)["input_ids"]  # type: ignore[operator]
    return chat_ids
