"""The default length of a dry-run's prompts."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MOST_TOKENS = 1024
# Keys of config.json that state the context, as vLLM reads them.
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


def fitting_prompt(
    model: str | None, engine_arguments: Sequence[str], output_tokens: Sequence[int]
) -> int:
    """Number of tokens: 1024, or the context without the output if that is smaller.

    The context is --max-model-len, or else the model's. vLLM refuses an invalid one.
    """
    contexts = [*_asked(engine_arguments), *(() if model is None else _stated(Path(model)))]
    rest = (context - max(output_tokens) for context in contexts[:1])
    return max(1, min([MOST_TOKENS, *rest]))


def _asked(engine_arguments: Sequence[str]) -> list[int]:
    """The value of --max-model-len; empty if it is not given, or has a unit such as 32k."""
    found: list[int] = []
    for number, argument in enumerate(engine_arguments):
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") == "--max-model-len":
            value = value if equals else "".join(engine_arguments[number + 1 : number + 2])
            found = [int(value)] if value.isdecimal() else []
    return found


def _stated(directory: Path) -> list[int]:
    try:
        config: Any = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    if not isinstance(config, dict):
        return []
    parts = [part for part in (config.get("text_config"), config) if isinstance(part, dict)]
    sizes = (part.get(key) for part in parts for key in _CONTEXT_KEYS)
    return [size for size in sizes if isinstance(size, int) and size > 0][:1]
