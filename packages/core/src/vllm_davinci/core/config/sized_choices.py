"""Choices that depend on step size, read from a step-time file: norm cores, prefetch bytes."""

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vllm_davinci.core.errors import ConfigurationError

# Names of choices: in rows of steps with prefills, and in rows of decode-only steps.
NORM_VECTOR_CORES = "norm_vector_cores"
PREFETCH_BYTES = "prefetch_bytes"


@dataclass(frozen=True)
class SizedChoices:
    """A choice for each listed number of tokens, ascending; None: the option's own value."""

    tokens: Sequence[int]
    choices: Sequence[int | None]

    def at(self, num_tokens: int) -> int | None:
        """The choice at the nearest listed size below, or at the smallest."""
        return self.choices[max(0, bisect_right(self.tokens, num_tokens) - 1)]

    @staticmethod
    def read(
        file: Path | None, rows: Literal["steps", "decodes"], name: str
    ) -> "SizedChoices | None":
        """Reads the choices from a file written by `vllm-davinci dry-run --step-costs`.

        Returns None without a file, or if its rows have no choice of this name. Raises
        ConfigurationError for an invalid file.
        """
        if file is None:
            return None
        try:
            found = json.loads(file.read_text(encoding="utf-8"))[rows]
            tokens = [int(row["tokens"]) for row in found]
            choices = [row.get(name) for row in found]
            if any(each is not None and (type(each) is not int or each < 0) for each in choices):
                raise ValueError(f"{name} is {choices}: expected whole numbers")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(
                f"step_costs = {str(file)!r} has no {rows} ({type(error).__name__}: {error}). "
                "`vllm-davinci dry-run --step-costs FILE` writes such a file."
            ) from error
        return None if all(each is None for each in choices) else SizedChoices(tokens, choices)
