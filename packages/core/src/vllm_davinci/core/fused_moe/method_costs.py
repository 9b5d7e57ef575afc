"""How long steps take with each way to the experts, of one engine, and which is the fastest."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from vllm_davinci.core.errors import ConfigurationError

Steps = Literal["decodes", "whole", "split"]
"""Steps without a prefill, and those with one: whole, or as ubatches."""


@dataclass(frozen=True)
class Fastest:
    """A method by its name, what a step takes with it, and what it takes with each candidate."""

    method: str
    durations: Mapping[str, float]

    @property
    def told(self) -> str:
        """A clause that can follow "because". Without durations: each step has other ones, and
        what is logged once is remembered."""
        others = ", ".join(sorted(name for name in self.durations if name != self.method))
        return f"by its costs the step takes longer with {others} (modelled)"


@dataclass(frozen=True)
class _Curves:
    """Durations of steps by method, at some numbers of tokens in rising order."""

    tokens: Sequence[int]
    by_method: Mapping[str, Sequence[float]]

    def at(self, num_tokens: int, method: str) -> float:
        """Interpolated; beyond the ends as at the ends, where ratios stay."""
        return float(np.interp(num_tokens, self.tokens, self.by_method[method]))


@dataclass(frozen=True)
class MethodCosts:
    """Durations of an engine's steps by method, in picoseconds of a modelled clock."""

    curves: Mapping[Steps, _Curves]

    def fastest(self, steps: Steps, num_tokens: int, candidates: Collection[str]) -> Fastest | None:
        """None where no candidate, or only one, has a duration.

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
        """Durations of a step of so many tokens, by all methods that are known."""
        curves = self.curves[steps]
        return {name: curves.at(num_tokens, name) for name in curves.by_method}

    @staticmethod
    def read(file: Path) -> "MethodCosts":
        """Reads what `vllm-davinci dry-run --step-costs` wrote. Raises ConfigurationError."""
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
                f"step_costs = {str(file)!r} has no durations by method "
                f"({type(error).__name__}: {error}). `vllm-davinci dry-run --step-costs FILE` "
                "writes such a file."
            ) from error


def _curves(rows: Sequence[tuple[int, Mapping[str, float]]]) -> _Curves:
    tokens = [int(size) for size, _ in rows]
    if tokens != sorted(set(tokens)):
        raise ValueError(f"sizes of steps are {tokens}: expected them rising")
    names = set.intersection(*(set(durations) for _, durations in rows)) if rows else set()
    return _Curves(
        tokens,
        {name: [float(durations[name]) for _, durations in rows] for name in sorted(names)},
    )
