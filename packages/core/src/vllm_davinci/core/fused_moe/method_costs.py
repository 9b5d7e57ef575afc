"""Modelled step time per dispatch method; picks the fastest."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from vllm_davinci.core.errors import ConfigurationError

Steps = Literal["decodes", "whole", "split"]
"""Decode-only steps, and steps with prefills: whole, or as ubatches."""


@dataclass(frozen=True)
class Fastest:
    """The fastest method by name, its step time, and the step times of all candidates."""

    method: str
    durations: Mapping[str, float]

    @property
    def told(self) -> str:
        """Reason for the log, without times, so that the same reason is logged once."""
        others = ", ".join(sorted(name for name in self.durations if name != self.method))
        return f"by its step times it is faster than {others} (modelled)"


@dataclass(frozen=True)
class _Curves:
    """Step times by method, at ascending numbers of tokens."""

    tokens: Sequence[int]
    by_method: Mapping[str, Sequence[float]]

    def at(self, num_tokens: int, method: str) -> float:
        """Interpolated step time; beyond the ends, the nearest one, because only ratios matter."""
        return float(np.interp(num_tokens, self.tokens, self.by_method[method]))


@dataclass(frozen=True)
class MethodCosts:
    """An engine's step times by method, in picoseconds of a modelled clock."""

    curves: Mapping[Steps, _Curves]

    def fastest(self, steps: Steps, num_tokens: int, candidates: Collection[str]) -> Fastest | None:
        """The fastest candidate; None if at most one candidate has a step time.

        num_tokens: most of any DP rank in the whole step
        """
        curves = self.curves.get(steps)
        if curves is None:
            return None
        known = [name for name in candidates if name in curves.by_method]
        if len(known) < 2:
            return None
        durations = {name: curves.at(num_tokens, name) for name in known}
        return Fastest(min(known, key=durations.__getitem__), durations)

    def durations(self, steps: Steps, num_tokens: int) -> dict[str, float]:
        """Times of a step of `num_tokens` tokens, by method."""
        curves = self.curves[steps]
        return {name: curves.at(num_tokens, name) for name in curves.by_method}

    @staticmethod
    def read(file: Path) -> "MethodCosts":
        """Reads a file of `vllm-davinci dry-run --step-costs`. Raises ConfigurationError."""
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            rows: dict[Steps, list[tuple[int, dict[str, float]]]] = {
                "decodes": [(row["tokens"], row["by_method"]) for row in content["decodes"]],
                "whole": [(row["tokens"], row["by_method"]["whole"]) for row in content["steps"]],
                "split": [(row["tokens"], row["by_method"]["split"]) for row in content["steps"]],
            }
            return MethodCosts({steps: _curves(found) for steps, found in rows.items()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(
                f"step_costs = {str(file)!r} has no step times by method ({type(error).__name__}: "
                f"{error}). `vllm-davinci dry-run --step-costs FILE` writes such a file."
            ) from error


def _curves(rows: Sequence[tuple[int, Mapping[str, float]]]) -> _Curves:
    tokens = [int(size) for size, _ in rows]
    if tokens != sorted(set(tokens)):
        raise ValueError(f"step sizes are {tokens}: expected ascending sizes")
    names = set.intersection(*(set(durations) for _, durations in rows)) if rows else set()
    return _Curves(
        tokens, {name: [float(durations[name]) for _, durations in rows] for name in sorted(names)}
    )
