"""Runs the steps of a dry-run's engine by one schedule after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.config import CUDAGraphMode

from vllm_davinci.core.components import stream_scheduler
from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.config.sized_choices import NORM_VECTOR_CORES, PREFETCH_BYTES, SizedChoices
from vllm_davinci.core.config.step_costs import engine_of_costs
from vllm_davinci.core.fused_moe.communication import CommunicationMethod
from vllm_davinci.core.fused_moe.method_costs import MethodCosts, Steps
from vllm_davinci.planner.dry_run.decode_chain import DecodeChain
from vllm_davinci.planner.dry_run.engine import executor_of
from vllm_davinci.planner.dry_run.stack import K, StepTime, stack_of
from vllm_davinci.planner.dry_run.step import OWN
from vllm_davinci.planner.dry_run.workload import RunningSteps, Workload, serve
from vllm_davinci.planner.errors import DryRunError

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

    from vllm_davinci.core.attention.mla.weight_prefetch import Prefetches
    from vllm_davinci.planner.dry_run.engine_arguments import PhantomEngineArgs
    from vllm_davinci.planner.dry_run.step import Step
    from vllm_davinci.vnpu.timing import Machine

_NEVER = 1 << 30
# Maximum tokens per request: larger steps hold several prompts, as they mostly do under load.
LONGEST_PROMPT = 4096


@dataclass(frozen=True)
class Schedule:
    """Execution of steps with prefills.

    method:       dispatch method of the experts; None for the engine's own choice
    is_split:     run as ubatches; None for the engine's own choice
    first_share:  first ubatch's share of a split step's tokens; None: equal ubatches
    norm_vector_cores: vector cores of norms in split steps; None: all
    """

    method: CommunicationMethod | None = None
    is_split: bool | None = False
    first_share: float | None = None
    norm_vector_cores: int | None = None


class Exploration:
    """Runs steps of one engine by any schedule that it supports."""

    def __init__(self, engine: LLMEngine, arguments: PhantomEngineArgs, machine: Machine) -> None:
        self._engine, self._arguments, self._machine = engine, arguments, machine
        self._executor = executor_of(engine)
        worker: Any = self._executor.driver_worker.worker
        self._runner: Any = worker.model_runner
        self._model: Any = worker.model_runner.get_model()
        self._tried = worker.tried_method
        config = engine.vllm_config
        self._limits = config.scheduler_config
        self._longest = config.model_config.max_model_len
        cache = config.cache_config
        self._cache_tokens = (cache.num_gpu_blocks or 0) * cache.block_size
        self._chain = DecodeChain(
            self._longest,
            self._cache_tokens,
            self._limits.max_num_batched_tokens,
            self._runner.decode_query_len,
        )
        self._own_policy: Any = self._runner.splitter.policy
        self._prefetches: Prefetches | None = self._runner.prefetches
        self._stack = stack_of(self._model, self._prefetches)
        cache_bytes = machine.figures["l2_bytes"]
        self._samples = {
            is_replayed: None
            if self._stack is None
            else self._stack.repetition(cache_bytes, is_replayed)
            for is_replayed in (False, True)
        }
        self._own_norm_cores: SizedChoices | None = None

    def described(self, model: str) -> dict[str, Any]:
        """Header of this engine's step-time table: machine, model, engine."""
        machine, config = self._machine, self._engine.vllm_config
        return {
            "modelled": True,
            "machine": machine.title,
            "figures": machine.hash,
            "chip": machine.chip,
            "topology": machine.topology,
            "model": model,
            "world_size": self._arguments.world_size,
            "engine": self._arguments.layout.of_whole(engine_of_costs(config, get_config(config))),
        }

    @property
    def longest_prompt(self) -> int:
        """Number of tokens of the longest prompt that a request may have."""
        return min(LONGEST_PROMPT, self._longest - 8)

    @property
    def can_split(self) -> bool:
        """True if steps may run as ubatches."""
        return self._own_policy is not None and self._own_policy.has_communication

    @property
    def _has_graphs(self) -> bool:
        mode: CUDAGraphMode = self._engine.vllm_config.compilation_config.cudagraph_mode
        return mode != CUDAGraphMode.NONE

    @property
    def can_shard(self) -> bool:
        """True if steps may run sequence parallel."""
        return bool(getattr(self._model, "is_sequence_parallel", False))

    @property
    def can_prefetch(self) -> bool:
        """True if decodes may prefetch the next layer's weights."""
        return self._prefetches is not None

    def prefetch(self, max_bytes: int) -> None:
        """Makes decodes prefetch up to max_bytes of each weight, in new graphs; 0: nothing."""
        if self._prefetches is not None:
            self._prefetches.limit.fix(max_bytes)

    def shard_from(self, num_tokens: int | None) -> None:
        """Makes steps of num_tokens or more run sequence parallel; None: no step."""
        self._model.min_sequence_parallel_tokens = _NEVER if num_tokens is None else num_tokens

    def methods(self, steps: Steps) -> list[CommunicationMethod | None]:
        """The dispatch methods that such steps can use; [None] if there is no choice."""
        rule = self._tried.rule
        return [None] if rule is None or rule.forced is not None else list(rule.candidates(steps))

    def prefill_sizes(self, asked: Sequence[int]) -> list[int]:
        """The requested sizes that a step can have, ascending."""
        most = min(self._limits.max_num_batched_tokens, self._cache_tokens // 2)
        return sorted(size for size in asked if size <= most and self._requests(size) is not None)

    def decode_sizes(self, asked: Sequence[int]) -> list[int]:
        """The requested sizes that a step of decodes can have, ascending."""
        most = min(self._limits.max_num_seqs, self._cache_tokens // (2 * 128))
        found = sorted({min(size, most) for size in asked})
        return self._chain.sizes_with_room(found)

    def meet_ranks(self) -> None:
        """Runs one step with each dispatch method before any is measured: an engine's first
        collectives take longer, because their ranks have not connected yet.
        """
        for method in self.methods("whole"):
            self.prefill_ps(1, Schedule(method))

    def prefill_ps(self, num_tokens: int, schedule: Schedule) -> int:
        """Modelled time of a prefill step of num_tokens tokens."""
        return self.prefill_on_each(num_tokens, schedule)[OWN]

    def prefill_on_each(self, num_tokens: int, schedule: Schedule) -> dict[str, int]:
        """Modelled times of a prefill step of num_tokens tokens, by machine."""
        self.follow(schedule)
        requests = self._requests(num_tokens)
        assert requests is not None
        lengths = tuple(
            num_tokens // requests + (number < num_tokens % requests) for number in range(requests)
        )

        def measured() -> dict[str, StepTime]:
            work = Workload(requests, requests, lengths, (1,))
            steps, _ = serve(self._engine, self._executor, work, hides_host=None)
            found = [step for step in steps if sum(step.tokens) == num_tokens]
            if not found:
                raise DryRunError(
                    f"{num_tokens} prompt tokens were split into steps of "
                    f"{[sum(step.tokens) for step in steps]}: raise --max-num-batched-tokens."
                )
            return found[0].times

        return self._of_all_layers(measured, is_replayed=False)

    def decodes_ps(
        self, method: CommunicationMethod | None, sizes: Sequence[int]
    ) -> dict[int, int]:
        """Modelled times of decode steps with `sizes` requests, by their tokens."""

        def measured() -> dict[int, StepTime]:
            self.decodes_by(method, sizes)
            steps = RunningSteps(self._engine, self._executor, hides_host=None)
            return self._chain.durations(self._engine, steps, sizes)

        return self._of_all_layers(measured, self._has_graphs)

    def _of_all_layers(
        self, measured: Callable[[], dict[K, StepTime]], is_replayed: bool
    ) -> dict[K, int]:
        """Step times of the whole model, extrapolated from a few layers if they repeat."""
        sample = self._samples[is_replayed]
        found = measured() if self._stack is None else self._stack.of_all(sample, measured)
        return {key: self._with_python(step) for key, step in found.items()}

    def _with_python(self, step: StepTime) -> int:
        figures = self._machine.figures
        python_ps = figures["host_step"] + step.requests * figures["host_step_request"]
        return step.with_python(python_ps, self._arguments.hides_host)

    def decodes_by(self, method: CommunicationMethod | None, sizes: Sequence[int]) -> None:
        """Makes decodes use this dispatch method, in new graphs of `sizes`."""
        self.follow(Schedule(method, is_split=None))
        graphs = self._runner.graphs
        if self._has_graphs:
            graphs.destroy()
            graphs.use_sizes(list(sizes))
            self._runner.capture_model()

    def decide_by(self, costs: Path) -> None:
        """Makes steps run as `auto` decides with this step-time table."""
        self._tried.costs = MethodCosts.read(costs)
        if self._own_policy is not None:
            scheduler: Any = stream_scheduler()
            read = scheduler.split_policy(mode="token", costs=costs).costs
            self._own_policy = replace(self._own_policy, costs=read)
            self._own_norm_cores = SizedChoices.read(costs, "steps", NORM_VECTOR_CORES)
        if self._prefetches is not None:
            self._prefetches.limit.choose(SizedChoices.read(costs, "decodes", PREFETCH_BYTES))

    def follow(self, schedule: Schedule) -> None:
        """Makes steps with prefills run by this schedule."""
        self._tried.method = schedule.method
        if self._own_policy is None:
            return
        rules: dict[str, Any] = {"first_share": schedule.first_share}
        if schedule.is_split is None:
            own = self._own_policy
            for name in ("costs", "min_total_tokens", "min_prefill_tokens", "first_share"):
                rules[name] = getattr(own, name)
        else:
            least = 0 if schedule.is_split else _NEVER
            rules |= {"costs": None, "min_total_tokens": least, "min_prefill_tokens": 0}
        self._runner.splitter.revise(**rules)
        self._runner.split_forward.limit_norms(schedule.norm_vector_cores)
        if schedule.is_split is None:
            self._runner.split_forward.limit_norms_by(self._own_norm_cores)

    def serve(self, workload: Workload) -> list[Step]:
        """Runs a workload; returns its steps."""
        steps, _ = serve(self._engine, self._executor, workload, self._arguments.hides_host)
        return steps

    def close(self) -> None:
        """Ends the engine."""
        self._engine.engine_core.shutdown()

    def _requests(self, num_tokens: int) -> int | None:
        """Number of prompts with num_tokens tokens in all; None if no step can hold them."""
        longest = min(LONGEST_PROMPT, self._longest - 1)
        requests = -(-num_tokens // longest)
        return requests if requests <= self._limits.max_num_seqs else None


def least(durations: Mapping[Any, int]) -> int:
    """The shortest step time of any method."""
    return min(durations.values())


def named(methods: Sequence[CommunicationMethod | None]) -> dict[str, CommunicationMethod | None]:
    """Maps names to methods; the name is "only" if there is no choice."""
    return {"only" if each is None else each.value: each for each in methods}
