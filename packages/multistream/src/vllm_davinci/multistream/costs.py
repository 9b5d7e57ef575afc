"""Step times, whole and split, by number of tokens: they replace thresholds."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from vllm_davinci.multistream.errors import CostsError

# Method name in files whose steps have only one.
_ONLY = "only"


@dataclass(frozen=True)
class StepCosts:
    """Times of steps with prefills, in one unit, at ascending numbers of tokens.

    whole, split: times by communication method; a step uses the fastest
    first_shares: per size, the first part's share of a split step's tokens; None: equal parts.
                  Empty: not known

    Each method is interpolated between sizes before the fastest is chosen: where two methods cross,
    both are slower than a line between the faster ends. Beyond the last size its values hold, and
    steps smaller than the first size stay whole.
    """

    tokens: Sequence[int]
    whole: Mapping[str, Sequence[float]]
    split: Mapping[str, Sequence[float]]
    first_shares: Sequence[float | None] = ()

    def __post_init__(self) -> None:
        ways = [*self.whole.values(), *self.split.values()]
        lengths = {len(durations) for durations in ways}
        if not self.tokens or not self.whole or not self.split or lengths != {len(self.tokens)}:
            raise CostsError("step times need a value, whole and split, at each size.")
        if any(a >= b for a, b in pairwise([0, *self.tokens])):
            raise CostsError(f"step sizes are {list(self.tokens)}: expected ascending numbers.")
        if min(min(durations) for durations in ways) <= 0:
            raise CostsError("step times must be above 0.")
        if len(self.first_shares) not in (0, len(self.tokens)) or any(
            share is not None and not 0 < share < 1 for share in self.first_shares
        ):
            raise CostsError("expected a first share per size, between 0 and 1.")

    def gains(self, num_tokens: int) -> bool:
        """True if a step of num_tokens tokens is faster split."""
        if num_tokens < self.tokens[0]:
            return False
        whole, split = self.durations(num_tokens)
        return min(split.values()) < min(whole.values())

    def first_share(self, num_tokens: int) -> float | None:
        """The first part's share of num_tokens tokens, from the nearest size below."""
        if not self.first_shares:
            return None
        return self.first_shares[max(0, bisect_right(self.tokens, num_tokens) - 1)]

    def durations(self, num_tokens: int) -> tuple[dict[str, float], dict[str, float]]:
        """Times of a step of num_tokens tokens by method, whole and split."""
        found = [
            {name: self._at(num_tokens, durations) for name, durations in ways.items()}
            for ways in (self.whole, self.split)
        ]
        return found[0], found[1]

    def _at(self, num_tokens: int, durations: Sequence[float]) -> float:
        if num_tokens <= self.tokens[0]:
            return durations[0]
        if num_tokens >= self.tokens[-1]:
            return durations[-1]
        after = bisect_right(self.tokens, num_tokens)
        share = (num_tokens - self.tokens[after - 1]) / (
            self.tokens[after] - self.tokens[after - 1]
        )
        return durations[after - 1] * (1 - share) + durations[after] * share

    @staticmethod
    def read(file: Path, ways: Collection[str] | None = None) -> StepCosts:
        """Reads a JSON file {"steps": [{"tokens": ..., "whole": ..., "split": ..., "by_method":
        {"whole": {...}, "split": {...}}}, ...]}, as `vllm-davinci dry-run --step-costs` writes it.
        Without "by_method" there is one method.

        ways: methods that this engine's steps can use; None: all in the file
        Raises CostsError.
        """
        try:
            steps = json.loads(file.read_text(encoding="utf-8"))["steps"]
            tokens = [step["tokens"] for step in steps]
            whole, split = (_ways(steps, name, ways) for name in ("whole", "split"))
            shares = [step.get("first_share") for step in steps]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CostsError(
                f"{file} has no step times ({type(error).__name__}: {error}). Name a file that "
                "`vllm-davinci dry-run --step-costs` wrote."
            ) from error
        return StepCosts(tokens, whole, split, shares)


def _ways(
    steps: Sequence[Mapping[str, Any]], name: str, asked: Collection[str] | None
) -> dict[str, list[float]]:
    rows = [step.get("by_method", {}).get(name) or {_ONLY: step[name]} for step in steps]
    known = set.intersection(*map(set, rows)) if rows else set()
    # The file of an engine with a single method has no names of methods.
    taken = known if asked is None else known.intersection(asked) or known
    return {way: [row[way] for row in rows] for way in sorted(taken)}
