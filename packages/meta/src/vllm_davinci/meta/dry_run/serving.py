"""`vllm serve` of a dry-run: its answers take their modelled time, on this host's clock."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from vllm_davinci.meta.dry_run.layout import Layout, busiest_rank
from vllm_davinci.meta.errors import DryRunError

_PACKAGE = "vllm_davinci.meta.dry_run.executor"


def fixed_arguments() -> list[str]:
    """Options of `vllm serve` that make its engine one rank among phantoms."""
    return [
        "--load-format=dummy",
        "--no-async-scheduling",
        f"--distributed-executor-backend={_PACKAGE}.PhantomExecutor",
        f"--worker-cls={_PACKAGE}.PhantomWorker",
    ]


def take_layout(engine_arguments: list[str], routing: str) -> tuple[Layout, int, list[str]]:
    """The layout that `vllm serve`'s options ask for, its number of ranks, and the other options.

    Raises DryRunError.
    """
    parser = argparse.ArgumentParser(prog="vllm-davinci dry-run", allow_abbrev=False)
    sizes = [
        ("--tensor-parallel-size", "-tp"),
        ("--data-parallel-size", "-dp"),
        ("--pipeline-parallel-size", "-pp"),
    ]
    for names in sizes:
        parser.add_argument(*names, type=int, default=1)
    parser.add_argument("--additional-config", type=json.loads, default={})
    known, others = parser.parse_known_args(engine_arguments)
    tensor, data = known.tensor_parallel_size, known.data_parallel_size
    stages = known.pipeline_parallel_size
    if min(tensor, data, stages) < 1:
        raise DryRunError("parallel sizes are at least 1")
    layout = Layout(data, stages, busiest_rank(routing, tensor * data))
    config = json.dumps(layout.options(known.additional_config))
    taken = [f"--tensor-parallel-size={tensor}", f"--additional-config={config}"]
    return layout, tensor * data * stages, [*taken, *others]


def start_server(model: str, engine_arguments: list[str]) -> None:
    """Becomes `vllm serve`. The environment has the virtual NPU's settings and the layout.

    Where the model's directory has no tokenizer, one stands in for it: as many words as the model
    has tokens.
    """
    tokenizer = model if _has_tokenizer(Path(model)) else _stand_in(Path(model))
    print(
        "vllm-davinci dry-run: serving with modelled times; nothing is computed. Clients that need "
        f"a tokenizer take --tokenizer {tokenizer}.",
        file=sys.stderr,
    )
    arguments = ["serve", model, f"--tokenizer={tokenizer}", *engine_arguments, *fixed_arguments()]
    os.execv(sys.executable, [sys.executable, "-m", "vllm.entrypoints.cli.main", *arguments])


def _has_tokenizer(directory: Path) -> bool:
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    return any((directory / name).is_file() for name in names)


def _stand_in(model: Path) -> str:
    """The directory of a tokenizer with a word for each token: text and tokens are one to one."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    config: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    if not size:
        raise DryRunError(
            f"{model}/config.json states no vocab_size, so that no tokenizer can stand in. Put the "
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
