"""Measures decode steps of decreasing size by aborting requests between sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_davinci.planner.dry_run.step import median_step
from vllm_davinci.planner.errors import DryRunError

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

    from vllm_davinci.planner.dry_run.stack import StepTime
    from vllm_davinci.planner.dry_run.step import Step
    from vllm_davinci.planner.dry_run.workload import RunningSteps

_CONTEXT = 128
# Measured steps per size; their median counts.
_DECODES = 3
# Additional steps, after those of the prompts, until all requests decode together.
_SPARE_STEPS = 4
# Cache tokens of a request beside its prompt.
_CACHE_OF_OUTPUT = 2 * 128


@dataclass(frozen=True)
class DecodeChain:
    """Limits of an engine within which its requests decode together.

    longest:        maximum tokens of a request
    cache_tokens:   capacity of the KV cache
    batched_tokens: maximum tokens of a step
    query_len:      tokens of a decode per step
    """

    longest: int
    cache_tokens: int
    batched_tokens: int
    query_len: int

    def sizes_with_room(self, sizes: Sequence[int]) -> list[int]:
        """The sizes that fit the engine's limits, ascending."""
        found = list(sizes)
        while len(found) > 1 and self.context(found) < 1:
            found.pop()
        return found

    def context(self, sizes: Sequence[int]) -> int:
        """Prompt length at which requests last for all steps; 0 if there is none."""
        most = max(sizes)
        context = min(_CONTEXT, max(1, self.cache_tokens // most - _CACHE_OF_OUTPUT))
        while context:
            steps = self._prefills(most, context) + _DECODES * len(sizes)
            if context + 1 + self.query_len * steps <= self.longest:
                break
            context //= 2
        return context

    def durations(
        self, engine: LLMEngine, steps: RunningSteps, sizes: Sequence[int]
    ) -> dict[int, StepTime]:
        """Times of decode steps of these sizes, by number of tokens."""
        context, ordered = self.context(sizes), sorted(sizes, reverse=True)
        if context < 1:
            raise DryRunError(
                f"--max-model-len {self.longest} is too short to measure steps of {ordered[0]} "
                "decodes: raise it."
            )
        waiting = [str(number) for number in range(ordered[0])]
        for name in waiting:
            steps.add(name, context, self.longest - context)
        for _ in range(self._prefills(ordered[0], context)):
            step, _ = steps.run()
            if self._all_decode(step, ordered[0]):
                break
        found: dict[int, StepTime] = {}
        for size in ordered:
            engine.abort_request(waiting[size:])
            del waiting[size:]
            newest = [steps.run()[0] for _ in range(_DECODES)]
            if not all(self._all_decode(step, size) for step in newest):
                raise DryRunError(
                    f"{size} requests never decoded together: lower --max-num-seqs, or allow "
                    "longer requests with --max-model-len and more tokens with "
                    "--max-num-batched-tokens."
                )
            found[sum(newest[0].tokens)] = median_step(newest).time
        engine.abort_request(waiting)
        return dict(sorted(found.items()))

    def _all_decode(self, step: Step, requests: int) -> bool:
        return len(step.tokens) == requests and max(step.tokens) <= self.query_len

    def _prefills(self, requests: int, context: int) -> int:
        """Maximum number of steps until all requests decode; running decodes take half of each
        step.
        """
        return -(-2 * requests * context // self.batched_tokens) + _SPARE_STEPS
