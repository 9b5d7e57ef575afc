"""Costs of steps, whole and split, by their tokens: with them no threshold is needed."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from vllm_davinci.multistream.errors import CostsError


@dataclass(frozen=True)
class StepCosts:
    """Durations of steps with prefills, in one unit, at some numbers of tokens in rising order.

    Between them both are interpolated; beyond the last one their ratio stays, and steps smaller
    than the first one stay whole.
    """

    tokens: Sequence[int]
    whole: Sequence[float]
    split: Sequence[float]

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.whole) == len(self.split) > 0:
            raise CostsError("costs of steps need a duration, whole and split, at each size.")
        if any(a >= b for a, b in pairwise([0, *self.tokens])):
            raise CostsError(f"sizes of steps are {list(self.tokens)}: expected them rising.")
        if min(*self.whole, *self.split) <= 0:
            raise CostsError("a step's duration is above 0.")

    def gains(self, num_tokens: int) -> bool:
        """Whether a step of so many tokens is faster split."""
        if num_tokens < self.tokens[0]:
            return False
        if num_tokens >= self.tokens[-1]:
            return self.split[-1] < self.whole[-1]
        after = bisect_right(self.tokens, num_tokens)
        share = (num_tokens - self.tokens[after - 1]) / (
            self.tokens[after] - self.tokens[after - 1]
        )

        def between(durations: Sequence[float]) -> float:
            return durations[after - 1] * (1 - share) + durations[after] * share

        return between(self.split) < between(self.whole)

    @staticmethod
    def read(file: Path) -> StepCosts:
        """Reads a JSON file {"steps": [{"tokens": ..., "whole": ..., "split": ...}, ...]}, as
        `vllm-davinci dry-run --step-costs` writes it. Raises CostsError."""
        try:
            steps = json.loads(file.read_text(encoding="utf-8"))["steps"]
            columns = [[step[name] for step in steps] for name in ("tokens", "whole", "split")]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CostsError(
                f"{file} has no costs of steps ({type(error).__name__}: {error}). Name a file that "
                "`vllm-davinci dry-run --step-costs` wrote."
            ) from error
        return StepCosts(*columns)
