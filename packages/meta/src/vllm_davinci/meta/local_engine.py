"""An offline engine for a local model, with a forecast of its time and memory before it starts.

`generate` and `compare` use it: any checkpoint directory or GGUF file, no hub, one device.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from vllm_davinci.meta import core_access, gguf, host_estimate
from vllm_davinci.meta.errors import MetaError, ModelFileError
from vllm_davinci.meta.given_arguments import problem_of_engine

if TYPE_CHECKING:
    from vllm import LLM

MAX_REQUESTS = 8
# A step takes at most 512 prompt tokens, so that the profile run of a start is short.
BATCHED_TOKENS = 512
BLOCK_TOKENS = 128
EXACT_CHIP = "reference"  # takes float32 and any size; a chip's operators do not


def add_model_arguments(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    parser.usage = "%(prog)s MODEL [options] [-- OPTIONS OF VLLM SERVE]"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "model", type=Path, help="a checkpoint's directory, or a GGUF file (Llama, Qwen, SmolLM)"
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=max_tokens,
        metavar="N",
        help="new tokens per prompt (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=host_estimate.BYTES_PER_VALUE,
        help="dtype of weights and cache (default: float32 on the virtual NPU, bfloat16 on a chip, "
        "whose operators take no float32)",
    )


class LocalEngine:
    """A model's directory, its dtype and tokenizer, and vLLM's engine once it is started."""

    def __init__(self, options: argparse.Namespace, arguments: list[str], console: Console) -> None:
        """Converts a GGUF file if given and imports vLLM. Raises MetaError, which says what is
        wrong.

        arguments: further options of `vllm serve`
        """
        model: Path = options.model
        if (problem := problem_of_engine(str(model), arguments)) is not None:
            raise ModelFileError(problem)
        if not model.exists():
            raise ModelFileError(f"there is no {model}: name a directory or a GGUF file")
        if options.max_tokens < 1:
            raise MetaError(f"--max-tokens is {options.max_tokens} and must be at least 1")
        began_s = time.monotonic()
        self.dtype: str = options.dtype or _default_dtype()
        if self.dtype == "float32":
            os.environ.setdefault("VNPU_SOC", EXACT_CHIP)
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        core_access.prepare()
        self._arguments = arguments
        self._console = console
        self._max_tokens = options.max_tokens
        if gguf.is_gguf(model):
            console.print(f"{model.name}: converting to bf16, once", highlight=False)
            self.directory = gguf.converted(model)
        else:
            self.directory = model
        self._size = host_estimate.size_of(self.directory)
        self.tokenizer = import_module("transformers").AutoTokenizer.from_pretrained(self.directory)
        import_module("vllm")
        self._import_s = time.monotonic() - began_s

    def start(self, prompts: Sequence[Sequence[int]], extra_bytes: int = 0) -> LLM:
        """Prints the forecast for these prompts, then starts the engine.

        prompts:     token ids
        extra_bytes: further memory that the caller takes
        """
        longest = max(map(len, prompts)) + self._max_tokens
        requests = min(MAX_REQUESTS, len(prompts))
        tokens = cache_tokens(longest, requests)
        forecast = host_estimate.estimate(
            self._size, self.dtype, tokens, BATCHED_TOKENS, self._import_s
        )
        self._check_memory(forecast.memory_bytes + extra_bytes)
        waves = -(-len(prompts) // MAX_REQUESTS)
        seconds = forecast.seconds(sum(map(len, prompts)), waves * self._max_tokens, requests)
        self._console.print(
            f"{self.directory.name}: {self._size.parameters / 1e6:.0f} M parameters in "
            f"{self.dtype}; about {forecast.start_s:.0f} s to start, {forecast.token_s * 1e3:.0f} "
            f"ms per decode step, {seconds:.0f} s in all, "
            f"{(forecast.memory_bytes + extra_bytes) / 2**30:.1f} GiB of this host's memory "
            "(estimated)",
            highlight=False,
            soft_wrap=True,
        )
        kv_bytes = tokens * self._size.kv_values * host_estimate.BYTES_PER_VALUE[self.dtype]
        ours = (
            f"--dtype={self.dtype}",
            f"--max-model-len={longest}",
            f"--max-num-seqs={requests}",
            f"--max-num-batched-tokens={max(min(BATCHED_TOKENS, requests * longest), requests)}",
            f"--kv-cache-memory-bytes={2 * kv_bytes + (8 << 20)}",
            "--enforce-eager",
        )
        return offline_engine(str(self.directory), [*ours, *self._arguments])

    def parameters_bytes(self, dtype: str) -> int:
        return self._size.parameters * host_estimate.BYTES_PER_VALUE[dtype]

    def _check_memory(self, needed: int) -> None:
        available = host_estimate.available_bytes()
        if needed > available:
            raise ModelFileError(
                f"{self.directory}: about {needed / 2**30:.1f} GiB of memory are needed, and this "
                f"host has {available / 2**30:.1f} GiB available. Take a smaller model, "
                "--dtype bfloat16, or fewer --max-tokens."
            )


def _default_dtype() -> str:
    """float32 if the device supports it, so that near ties are decided as in transformers."""
    is_exact = os.environ.get("VNPU_SOC", EXACT_CHIP) == EXACT_CHIP
    return "float32" if is_exact and core_access.is_virtual() else "bfloat16"


def cache_tokens(longest: int, requests: int) -> int:
    """Tokens of a KV cache for these requests of at most `longest` tokens each, in whole blocks.

    One more block per request covers what the engine reserves and the next token.
    """
    return requests * (-(-longest // BLOCK_TOKENS) + 1) * BLOCK_TOKENS


def offline_engine(model: str, arguments: Sequence[str]) -> LLM:
    """Starts an offline engine with these options of `vllm serve`; errors are vLLM's."""
    from dataclasses import fields

    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(
        FlexibleArgumentParser(prog="vllm-davinci ... --", exit_on_error=False)
    )
    given = EngineArgs.from_cli_args(parser.parse_args(["--model", model, *arguments]))
    return LLM(**{field.name: getattr(given, field.name) for field in fields(given)})


def start_problem(error: Exception) -> str:
    """Says in one line why an engine did not start."""
    if isinstance(error, MetaError):
        return str(error)
    from vllm_davinci.core.process.plain_errors import words_of  # imports vLLM

    return words_of(error, error.__traceback__) or str(error)


def greedy(llm: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Greedy continuations as token ids; a sequence ends at the model's end token."""
    from vllm import SamplingParams

    outputs = llm.generate(
        [{"prompt_token_ids": list(prompt)} for prompt in prompts],
        SamplingParams(max_tokens=max_tokens, temperature=0, detokenize=False),
        use_tqdm=False,
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def graph_replays(llm: Any) -> int:
    """Steps of the first rank that replayed a captured graph; 0 where all of them are eager."""
    return sum(llm.collective_rpc("graph_replays")[0].values())
