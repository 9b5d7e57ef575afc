"""The whole layout of a dry-run, of which vLLM's engine knows one rank.

The engine has one data-parallel rank and one pipeline stage, so that no other engine is needed. The
worker reads the whole layout from an environment variable: with `--serve` it is another process
than the command.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_davinci.planner.environment_variables import DAVINCI_DRY_RUN
from vllm_davinci.planner.errors import DryRunError

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

BALANCED = "balanced"
"""Routing that gives each expert rank the same number of rows."""
_MILLION = 10**6


@dataclasses.dataclass(frozen=True)
class Layout:
    """Sizes of the whole group, and the load of its busiest expert rank.

    busiest: rows of the busiest expert rank over the mean of all ranks; 1 is balanced. The one real
             rank is the busiest, for which the others wait
    """

    data_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    busiest: float = 1.0

    def tell(self) -> None:
        """Passes the layout to workers of this process and its children."""
        os.environ[DAVINCI_DRY_RUN] = json.dumps(dataclasses.asdict(self))

    @staticmethod
    def told() -> Layout:
        """The layout passed to this process; the default is one rank of each kind."""
        return Layout(**json.loads(os.environ.get(DAVINCI_DRY_RUN, "{}")))

    def leave_one_rank(self, parallel: ParallelConfig) -> None:
        """Reduces the configuration of the whole layout to one rank."""
        if self.data_parallel_size > 1:
            parallel.reconfigure_for_independent_dp_rank()
        parallel.pipeline_parallel_size = 1
        parallel.world_size //= self.pipeline_parallel_size

    def restore(self, parallel: ParallelConfig, is_moe: bool) -> None:
        """Undoes `leave_one_rank` in the worker, which computes as a rank of the whole layout.

        is_moe: True if data-parallel ranks compute together; otherwise they are independent.
        """
        if is_moe:
            parallel.data_parallel_size = self.data_parallel_size
            parallel.data_parallel_size_local = self.data_parallel_size
        parallel.pipeline_parallel_size = self.pipeline_parallel_size
        parallel.world_size *= self.pipeline_parallel_size

    def of_whole(self, engine: dict[str, Any]) -> dict[str, Any]:
        """The engine's description for files, with the sizes of the whole layout."""
        sizes = ("data_parallel_size", "pipeline_parallel_size")
        return {**engine, **{name: getattr(self, name) for name in sizes}}

    def routed_share(self, expert_ranks: int) -> tuple[int, int]:
        """This rank's share of all experts' rows: numerator and denominator."""
        return round(self.busiest * _MILLION), expert_ranks * _MILLION


def busiest_rank(routing: str, expert_ranks: int) -> float:
    """Rows of the busiest expert rank over the mean. Raises DryRunError.

    routing: "balanced", a number from 1 on, or the path of a JSON file with recorded loads: a list
             of layers, each a list with the number of rows of each expert. Experts are placed on
             ranks in order. Each layer waits for its busiest rank, so the layers' times add up.
    """
    if routing == BALANCED:
        return 1.0
    try:
        number = float(routing)
    except ValueError:
        return _of_recorded_loads(Path(routing), expert_ranks)
    if not 1 <= number <= expert_ranks:
        raise DryRunError(
            f"--routing {routing}: expected 1 to {expert_ranks}, the range of the busiest of "
            f"{expert_ranks} expert ranks over the mean, `balanced`, or a file of loads."
        )
    return number


def _of_recorded_loads(file: Path, expert_ranks: int) -> float:
    try:
        layers = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DryRunError(
            f"--routing {file}: {error}. State `balanced`, a number from 1 on, or a JSON file with "
            "a list of layers, each a list of its experts' rows."
        ) from error
    busiest, mean = 0.0, 0.0
    for number, loads in enumerate(layers if isinstance(layers, list) else [None]):
        if not isinstance(loads, list) or not loads or len(loads) % expert_ranks:
            raise DryRunError(
                f"--routing {file}: layer {number} must be a list of rows per expert, of a "
                f"length divisible by {expert_ranks}, the number of expert ranks."
            )
        of_rank = len(loads) // expert_ranks
        rows = [sum(loads[r * of_rank : (r + 1) * of_rank]) for r in range(expert_ranks)]
        busiest += max(rows)
        mean += sum(rows) / expert_ranks
    if mean <= 0:
        raise DryRunError(f"--routing {file}: all loads are zero.")
    return busiest / mean
