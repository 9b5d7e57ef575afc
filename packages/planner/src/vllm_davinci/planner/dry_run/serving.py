"""Runs `vllm serve` in a dry-run: answers take their modelled time on this host's clock."""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import uvloop
from vllm.entrypoints.common.cli_args import validate_parsed_serve_args
from vllm.entrypoints.common.startup import cli_env_setup
from vllm.entrypoints.launchers.api_server.entry import (
    build_and_serve,
    build_async_engine_client_from_engine_args,
)
from vllm.entrypoints.launchers.launcher import setup_server
from vllm.logger import configure_logging_from_args
from vllm.usage.usage_lib import UsageContext

from vllm_davinci.planner.dry_run.engine_arguments import PhantomEngineArgs, parse
from vllm_davinci.planner.errors import DryRunError
from vllm_davinci.vnpu.timing import Machine


def run_server(model: str, routing: str, engine_arguments: list[str], machine: Machine) -> None:
    """Serves until interrupted. Raises DryRunError.

    If the model's directory has no tokenizer, a stand-in is used, with one word per token.
    """
    tokenizer = model if _has_tokenizer(Path(model)) else _stand_in(Path(model))
    print(
        "vllm-davinci dry-run: serving with modelled times; nothing is computed. Clients that "
        f"need a tokenizer can use --tokenizer {tokenizer}.",
        file=sys.stderr,
    )
    cli_env_setup()
    parsed = parse([f"--model={model}", f"--tokenizer={tokenizer}"], engine_arguments, True)
    configure_logging_from_args(parsed)
    validate_parsed_serve_args(parsed)
    arguments = PhantomEngineArgs.for_machine(parsed, routing, machine)
    uvloop.run(_serve(parsed, arguments))


async def _serve(parsed: argparse.Namespace, arguments: PhantomEngineArgs) -> None:
    """Runs vLLM's server with an engine built from these arguments."""
    address, sock = setup_server(parsed, reuse_port=False)
    async with build_async_engine_client_from_engine_args(
        arguments, usage_context=UsageContext.OPENAI_API_SERVER
    ) as client:
        shutdown = await build_and_serve(client, address, sock, parsed)
    try:
        await shutdown
    finally:
        sock.close()


def _has_tokenizer(directory: Path) -> bool:
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    return any((directory / name).is_file() for name in names)


def _stand_in(model: Path) -> str:
    """Directory of a tokenizer with one word per token, so that text and tokens correspond."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    config: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    if not size:
        raise DryRunError(
            f"{model}/config.json has no vocab_size, which a stand-in tokenizer needs. Put the "
            "model's tokenizer into the directory."
        )
    words = {f"w{number}": number for number in range(size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    directory = Path(tempfile.mkdtemp(prefix="vllm-davinci-dry-run-tokenizer."))
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "w1",
        "model_max_length": config.get("max_position_embeddings", 1 << 20),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return str(directory)
