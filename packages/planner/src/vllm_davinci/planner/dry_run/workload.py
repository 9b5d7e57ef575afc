"""Requests of a dry-run, and their times on the modelled clock."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm import SamplingParams

from vllm_davinci.planner.dry_run.step import Step
from vllm_davinci.planner.errors import DryRunError
from vllm_davinci.vnpu.timing import pass_host_step, read_report, read_variants, restart_timeline

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

    from vllm_davinci.planner.dry_run.executor import PhantomExecutor

# Any token that is not special in a known model.
_PROMPT_TOKEN = 100


@dataclasses.dataclass(frozen=True)
class Workload:
    """Requests, of which `concurrency` run at any time: when one ends, the next begins. Their
    lengths follow prompt_tokens and output_tokens in turn.

    sampled_chunks: number of chunks of the longest prompt to model; requests then begin with all
                    but their prompt's last token cached; None: runs all prompts
    """

    requests: int
    concurrency: int
    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    sampled_chunks: int | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return max(prompt + output for prompt, output in self.lengths())

    def lengths(self) -> list[tuple[int, int]]:
        """Prompt and output tokens of each request."""
        prompts, outputs = itertools.cycle(self.prompt_tokens), itertools.cycle(self.output_tokens)
        return [(next(prompts), next(outputs)) for _ in range(self.requests)]

    def largest_prompts(self) -> int:
        """Maximum prompt tokens of concurrent requests."""
        prompts = [prompt for prompt, _ in self.lengths()]
        ends = range(self.concurrency, len(prompts) + 1)
        return max(sum(prompts[end - self.concurrency : end]) for end in ends)


@dataclasses.dataclass
class RequestTimes:
    """Times of a request, in picoseconds of the modelled clock."""

    output_tokens: int
    begin: int
    first_token: int = 0
    end: int = 0


@dataclasses.dataclass(frozen=True)
class Served:
    """Modelled times of a served workload."""

    times: Sequence[RequestTimes]
    duration_ps: int

    def to_json(self) -> dict[str, Any]:
        """Figures by the names of `vllm bench serve`; times in ms."""
        seconds = max(self.duration_ps, 1) / 10**12
        figures: dict[str, Any] = {
            "completed": len(self.times),
            "duration_s": seconds,
            "request_throughput": len(self.times) / seconds,
            "output_throughput": sum(t.output_tokens for t in self.times) / seconds,
        }
        first = [(t.first_token - t.begin) / 10**9 for t in self.times]
        later = [
            (t.end - t.first_token) / 10**9 / (t.output_tokens - 1)
            for t in self.times
            if t.output_tokens > 1
        ]
        for name, values in (("ttft", first), ("tpot", later)):
            if values:
                figures[f"mean_{name}_ms"] = statistics.fmean(values)
                figures[f"median_{name}_ms"] = statistics.median(values)
                figures[f"p99_{name}_ms"] = sorted(values)[-(-len(values) * 99 // 100) - 1]
        return figures


def receive(engine: LLMEngine, name: str, tokens: int) -> None:
    """Gives a waiting request the cache of its first tokens, as if another engine had sent it.

    Raises DryRunError if the cache has no room.
    """
    core: Any = engine.engine_core
    scheduler = core.engine_core.scheduler
    (request,) = (r for i, r in scheduler.requests.items() if i.rpartition("-")[0] == name)
    blocks = scheduler.kv_cache_manager.allocate_slots(
        request, 0, num_external_computed_tokens=tokens, delay_cache_blocks=True
    )
    if blocks is None:
        raise DryRunError(
            f"the KV cache has no room for {tokens} tokens of a further request. "
            "Lower --concurrency."
        )
    request.num_computed_tokens = tokens


class RunningSteps:
    """Runs an engine's steps one by one, on a new timeline.

    hides_host: vLLM's own Python runs while the host would wait for the device; None leaves it out
    """

    def __init__(
        self, engine: LLMEngine, executor: PhantomExecutor, hides_host: bool | None
    ) -> None:
        self._engine, self._executor, self._hides_host = engine, executor, hides_host
        restart_timeline()
        self.begin = self.newest = read_report()
        self._on_others = read_variants()

    def add(self, name: str, prompt_tokens: int, output_tokens: int) -> None:
        """Adds a request that ends at its maximum of output tokens only."""
        params = SamplingParams(
            max_tokens=output_tokens, ignore_eos=True, temperature=0.0, detokenize=False
        )
        # The salt keeps prefix caching from finding one request's tokens in another's.
        prompt: Any = {"prompt_token_ids": [_PROMPT_TOKEN] * prompt_tokens, "cache_salt": name}
        self._engine.add_request(name, prompt, params)

    def run(self) -> tuple[Step, list[Any]]:
        """Runs one engine step; returns the step and vLLM's outputs."""
        host = time.monotonic()
        self._executor.scheduled = {}
        outputs = list(self._engine.step())
        wall_seconds = time.monotonic() - host
        if self._hides_host is not None:
            pass_host_step(len(self._executor.scheduled), self._hides_host)
        after, others_after = read_report(), read_variants()
        on_others = {name: report - self._on_others[name] for name, report in others_after.items()}
        tokens = tuple(self._executor.scheduled.values())
        step = Step(tokens, after - self.newest, wall_seconds, on_others)
        self.newest, self._on_others = after, others_after
        return step, outputs


def serve(
    engine: LLMEngine, executor: PhantomExecutor, workload: Workload, hides_host: bool | None = True
) -> tuple[list[Step], Served]:
    """Runs the workload; returns the engine's steps and the requests' times.

    hides_host: as in RunningSteps
    """
    waiting = [(str(n), *length) for n, length in enumerate(workload.lengths())]
    waiting.reverse()
    times: dict[str, RequestTimes] = {}
    running = RunningSteps(engine, executor, hides_host)

    def add(now: int) -> None:
        name, prompt_tokens, output_tokens = waiting.pop()
        times[name] = RequestTimes(output_tokens, begin=now)
        running.add(name, prompt_tokens, output_tokens)
        if workload.sampled_chunks is not None:
            receive(engine, name, prompt_tokens - 1)

    steps = []
    for _ in range(workload.concurrency):
        add(running.begin.host_ps)
    while engine.has_unfinished_requests():
        step, outputs = running.run()
        steps.append(step)
        now = running.newest.host_ps
        for output in outputs:
            of_request = times[output.request_id]
            of_request.first_token = of_request.first_token or now
            if output.finished:
                of_request.end = now
                if waiting:
                    add(now)
    return steps, Served(list(times.values()), running.newest.host_ps - running.begin.host_ps)
