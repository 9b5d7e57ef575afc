"""Estimates a long prompt's time from some of its chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from vllm_davinci.planner.dry_run.workload import RunningSteps, receive
from vllm_davinci.planner.errors import DryRunError
from vllm_davinci.vnpu.timing import Report

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

    from vllm_davinci.planner.dry_run.executor import PhantomExecutor
    from vllm_davinci.planner.dry_run.step import Step


@dataclasses.dataclass(frozen=True)
class SampledPrompt:
    """A prompt in equal chunks, whose times change steadily with their position.

    tokens:   of the prompt
    chunks:   number of its chunks
    modelled: the steps of some chunks by their number from 0, both ends among them
    """

    tokens: int
    chunks: int
    modelled: Mapping[int, tuple[Step, ...]]

    def total_ps(self, time: Callable[[Report], int]) -> float:
        """Sums the times of all chunks, interpolating linearly between modelled ones."""
        times = {
            chunk: sum(time(step.modelled) for step in steps)
            for chunk, steps in self.modelled.items()
        }
        total = float(sum(times.values()))
        for (first, before), (last, after) in pairwise(sorted(times.items())):
            total += (last - first - 1) * (before + after) / 2
        return total

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.tokens,
            "chunks": self.chunks,
            "modelled_chunks": sorted(self.modelled),
            "time_s": self.total_ps(lambda report: report.host_ps) / 10**12,
            "bound_s": self.total_ps(lambda report: report.overlap_bound_ps) / 10**12,
        }

    def __str__(self) -> str:
        told = self.to_json()
        return (
            f"A prompt of {self.tokens:,} tokens takes {told['time_s']:,.1f} s (bound "
            f"{told['bound_s']:,.1f}): modelled, {len(self.modelled)} of {self.chunks} chunks"
            f"{', interpolated' * (len(self.modelled) < self.chunks)}."
        )


def chunks_of(chunks: int, samples: int) -> list[int]:
    """Indices of at most `samples` chunks: the first, which has no tokens before it, the second,
    the last, and others at even distances.
    """
    rest, later = min(samples, chunks) - 1, chunks - 2
    return sorted({0, *(1 + round(i * later / max(rest - 1, 1)) for i in range(rest))})


def sample(
    engine: LLMEngine, executor: PhantomExecutor, tokens: int, samples: int, hides_host: bool | None
) -> SampledPrompt:
    """Runs some chunks of a prompt, each as a request whose earlier tokens are already cached.

    hides_host: as in RunningSteps
    Raises DryRunError if one does not fit.
    """
    running = RunningSteps(engine, executor, hides_host)

    def run(start: int, end: int) -> tuple[Step, ...]:
        running.add(f"{start}", end, 1)
        if start:
            receive(engine, f"{start}", start)
        steps = []
        while engine.has_unfinished_requests():
            steps.append(running.run()[0])
        return tuple(steps)

    limits = engine.vllm_config.scheduler_config
    size = min(limits.max_num_batched_tokens, limits.long_prefill_token_threshold or tokens, tokens)
    count = -(-tokens // size)
    modelled = {}
    for chunk in chunks_of(count, samples):
        start, end = chunk * size, min((chunk + 1) * size, tokens)
        modelled[chunk] = steps = run(start, end)
        found = [sum(step.tokens) for step in steps if step.tokens]
        if found != [end - start]:
            raise DryRunError(
                f"a chunk of {end - start} tokens ran in steps of {found}: --sampled-chunks models "
                "prompts in equal chunks only."
            )
    return SampledPrompt(tokens, count, modelled)
