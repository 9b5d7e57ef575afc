"""Steps in which requests decode, of one size after the other: some leave, and the rest goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_davinci.planner.dry_run.step import median_step
from vllm_davinci.planner.errors import DryRunError

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

    from vllm_davinci.planner.dry_run.stack import Durations
    from vllm_davinci.planner.dry_run.step import Step
    from vllm_davinci.planner.dry_run.workload import RunningSteps

_CONTEXT = 128
# Steps of each size; the figure is their median.
_DECODES = 3
# Steps at most until all requests decode together, beside those that their prompts take.
_SPARE_STEPS = 4
# Tokens of the cache that a request may take beside its prompt.
_CACHE_OF_OUTPUT = 2 * 128


@dataclass(frozen=True)
class DecodeChain:
    """Limits of one engine, and how its requests decode together within them.

    longest:        tokens of a request
    cache_tokens:   that the cache holds
    batched_tokens: of one step
    query_len:      tokens of a request that decodes
    """

    longest: int
    cache_tokens: int
    batched_tokens: int
    query_len: int

    def sizes_with_room(self, sizes: Sequence[int]) -> list[int]:
        """Those of the rising sizes that requests of such a length can decode in."""
        found = list(sizes)
        while len(found) > 1 and self.context(found) < 1:
            found.pop()
        return found

    def context(self, sizes: Sequence[int]) -> int:
        """Tokens of each request's prompt, so that it ends after all steps; 0: no room."""
        most = max(sizes)
        context = min(_CONTEXT, max(1, self.cache_tokens // most - _CACHE_OF_OUTPUT))
        while context:
            steps = self._prefills(most, context) + _DECODES * len(sizes)
            if context + 1 + self.query_len * steps <= self.longest:
                break
            context //= 2
        return context

    def durations(self, engine: LLMEngine, steps: RunningSteps, sizes: Sequence[int]) -> Durations:
        """Times of steps in which so many requests decode, by their tokens."""
        context, ordered = self.context(sizes), sorted(sizes, reverse=True)
        if context < 1:
            raise DryRunError(
                f"requests of {self.longest} tokens end before steps of {ordered[0]} decodes are "
                "measured: allow longer ones with --max-model-len."
            )
        waiting = [str(number) for number in range(ordered[0])]
        for name in waiting:
            steps.add(name, context, self.longest - context)
        for _ in range(self._prefills(ordered[0], context)):
            step, _ = steps.run()
            if self._all_decode(step, ordered[0]):
                break
        found: Durations = {}
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
        """Steps at most until all decode; those that do already take half of each step."""
        return -(-2 * requests * context // self.batched_tokens) + _SPARE_STEPS
