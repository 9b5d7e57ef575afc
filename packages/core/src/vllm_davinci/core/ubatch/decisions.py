"""Decides whether to split a step, counts the decisions and logs them."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_davinci.core.components.protocols import Decision, StepFacts, StreamScheduler
from vllm_davinci.core.config.options import DualBatchConfig
from vllm_davinci.core.log import init_logger
from vllm_davinci.core.ubatch.prefix_order import CachedPrefixes, is_in_order

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

logger = init_logger(__name__)

Counts = dict[str, int]


def has_communication(parallel_config: "ParallelConfig") -> bool:
    """True if more than one rank computes a layer."""
    return parallel_config.tensor_parallel_size > 1 or parallel_config.data_parallel_size > 1


class Decisions:
    """Decides for every step of one engine, and reports why steps were not split.

    costs:      step-time file of this engine, or None
    ways:       names of the dispatch methods of its steps; None: all in the file
    interval_s: seconds between log lines about decisions; None: no log
    publish:    called with the number of decisions by reason after each decision, or None
    """

    def __init__(
        self,
        scheduler: StreamScheduler,
        options: DualBatchConfig,
        has_communication: bool,
        costs: Path | None = None,
        ways: Collection[str] | None = None,
        interval_s: float | None = None,
        publish: Callable[[Counts], None] | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._policy: Any = scheduler.split_policy(
            mode=options.split,
            costs=costs,
            ways=ways,
            enabled=options.enabled,
            has_communication=has_communication,
            num_ubatches=options.num_ubatches,
            min_total_tokens=options.min_total_tokens_to_split,
            min_prefill_tokens=options.min_prefill_tokens_to_split,
            min_decode_tokens=options.min_decode_tokens_to_split,
            imbalance_ratio=options.imbalance_ratio,
            alignment=options.token_alignment,
            first_share=options.first_share,
            decode=options.decode,
        )
        self._interval_s = interval_s
        self._publish = publish
        self._last_log = time.monotonic()
        self._counted: Counter[Enum] = Counter()
        self._logged: Counter[Enum] = Counter()
        self._examples: dict[Enum, str] = {}

    @property
    def policy(self) -> Any:
        """The scheduler's policy currently in force."""
        return self._policy

    def revise(self, **rules: Any) -> None:
        """Changes the rules from now on: fields of the scheduler's policy."""
        self._policy = replace(self._policy, **rules)

    @contextmanager
    def revised(self, **rules: Any) -> Iterator[None]:
        """Changes the rules inside the block."""
        policy = self._policy
        self.revise(**rules)
        try:
            yield
        finally:
            self._policy = policy

    def facts(self, query_lens: Sequence[int], **facts: int) -> StepFacts:
        """Facts about one step. query_lens: new tokens of each request, in batch order"""
        return self._scheduler.step_facts(query_lens, **facts)

    def decide(self, step: StepFacts, prefixes: CachedPrefixes | None = None) -> Decision:
        """The decision for one step; counts nothing.

        prefixes: its requests' cached tokens; None if no request can read blocks that another one
                  fills in this step, as between decodes: only full blocks are shared
        """
        decision = self._policy.decide(step)
        if decision.split is None or prefixes is None:
            return decision
        if is_in_order(prefixes, np.asarray(step.query_lens), decision.split.cuts):
            return decision
        return decision.withdrawn("PREFIX_DEPENDENCY")

    def count(self, step: StepFacts, decision: Decision) -> None:
        """Counts the decision with which the step runs; publishes it and logs if due."""
        self._counted[decision.reason] += 1
        self._examples[decision.reason] = _describe(step, decision)
        if self._publish is not None:
            self._publish(self.counts())
        now = time.monotonic()
        if self._interval_s is not None and now - self._last_log >= self._interval_s:
            self._last_log = now
            self.log()

    def counts(self) -> Counts:
        """Reason -> number of steps since the start."""
        return {reason.name.lower(): count for reason, count in self._counted.items()}

    def log(self) -> None:
        """Logs one line: the decisions since the last line, with an example of each reason."""
        new = self._counted - self._logged
        self._logged = self._counted.copy()
        lines = [
            f"{count} x {reason.value} (the newest: {self._examples[reason]})"
            for reason, count in new.most_common()
        ]
        if lines:
            logger.info("Dual-batch overlap, decisions by step: %s", "; ".join(lines))


def _describe(step: StepFacts, decision: Decision) -> str:
    figures = (
        f"{len(step.query_lens)} requests, {step.num_tokens} tokens, "
        f"{step.num_prefill_tokens} of them prefill"
    )
    if decision.split is None:
        return figures
    return f"{figures}, cut at {', '.join(map(str, decision.split.cuts))}"
