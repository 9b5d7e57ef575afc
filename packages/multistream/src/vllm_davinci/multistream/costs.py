"""Costs of steps, whole and split, by their tokens: with them no threshold is needed."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from vllm_davinci.multistream.errors import CostsError

# Of files whose steps have one way to communicate.
_ONLY = "only"


@dataclass(frozen=True)
class StepCosts:
    """Durations of steps with prefills, in one unit, at some numbers of tokens in rising order.

    whole, split: by the ways in which such steps can communicate, of which each takes the fastest
    first_shares: at each size, of a split step's tokens, those of its first part; None: all parts
                  are equal. Empty: nothing is known of it

    Each way is interpolated between the sizes, and the fastest is found then: two ways that cross
    between two sizes are both slower there than a line between the faster ones. Beyond the last
    size all stays as it is there, and steps smaller than the first one stay whole.
    """

    tokens: Sequence[int]
    whole: Mapping[str, Sequence[float]]
    split: Mapping[str, Sequence[float]]
    first_shares: Sequence[float | None] = ()

    def __post_init__(self) -> None:
        ways = [*self.whole.values(), *self.split.values()]
        lengths = {len(durations) for durations in ways}
        if not self.tokens or not self.whole or not self.split or lengths != {len(self.tokens)}:
            raise CostsError("costs of steps need a duration, whole and split, at each size.")
        if any(a >= b for a, b in pairwise([0, *self.tokens])):
            raise CostsError(f"sizes of steps are {list(self.tokens)}: expected them rising.")
        if min(min(durations) for durations in ways) <= 0:
            raise CostsError("a step's duration is above 0.")
        if len(self.first_shares) not in (0, len(self.tokens)) or any(
            share is not None and not 0 < share < 1 for share in self.first_shares
        ):
            raise CostsError("a first share is between 0 and 1, one for each size.")

    def gains(self, num_tokens: int) -> bool:
        """Whether a step of so many tokens is faster split."""
        if num_tokens < self.tokens[0]:
            return False
        whole, split = self.durations(num_tokens)
        return min(split.values()) < min(whole.values())

    def first_share(self, num_tokens: int) -> float | None:
        """The share of the first part in so many tokens: that of the nearest size below."""
        if not self.first_shares:
            return None
        return self.first_shares[max(0, bisect_right(self.tokens, num_tokens) - 1)]

    def durations(self, num_tokens: int) -> tuple[dict[str, float], dict[str, float]]:
        """Durations of a step of so many tokens by its ways, whole and split."""
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
        Without "by_method" there is one way.

        ways: those that this engine's steps can go; None: all that the file has
        Raises CostsError.
        """
        try:
            steps = json.loads(file.read_text(encoding="utf-8"))["steps"]
            tokens = [step["tokens"] for step in steps]
            whole, split = (_ways(steps, name, ways) for name in ("whole", "split"))
            shares = [step.get("first_share") for step in steps]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CostsError(
                f"{file} has no costs of steps ({type(error).__name__}: {error}). Name a file that "
                "`vllm-davinci dry-run --step-costs` wrote."
            ) from error
        return StepCosts(tokens, whole, split, shares)


def _ways(
    steps: Sequence[Mapping[str, Any]], name: str, asked: Collection[str] | None
) -> dict[str, list[float]]:
    rows = [step.get("by_method", {}).get(name) or {_ONLY: step[name]} for step in steps]
    known = set.intersection(*map(set, rows)) if rows else set()
    # A file of an engine that had nothing to choose names no way.
    taken = known if asked is None else known.intersection(asked) or known
    return {way: [row[way] for row in rows] for way in sorted(taken)}
